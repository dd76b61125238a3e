"""How llama.cpp's architectures are read as transformers models: keys, weight names, and what decoders share.

Sources: llama.cpp's ``gguf-py/gguf/constants.py`` (keys), ``conversion/`` (order and values of weights) and
``src/models/`` (what each key means).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mmspec.errors import shown
from mmspec.targets.gguf_file import GGUFFile

_REQUIRED: Any = object()


class Keys:
    """Metadata of a file below the name of its architecture. Records which keys were read, and as what.

    Attributes:
        tensors: names of the file's tensors.
        fields: configuration fields by key; None for keys that several fields depend on.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file, self._prefix = file, f"{file.architecture()}."
        self.tensors = file.tensors
        self.fields: dict[str, str | None] = {}

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._file.metadata

    def __call__(self, key: str, default: Any = _REQUIRED, field: str | None = None) -> Any:
        """The value of a key: epsilons, bases, scales and factors are finite numbers; ``GGUFFile`` checks counts.
        Raises ``ValueError``: a required key is missing, or a value is not finite."""
        name = self._prefix + key
        if name not in self._file.metadata:
            if default is _REQUIRED:
                raise ValueError(f"expected the key {name}, found none")
            return default
        self.fields[key] = field or self.fields.get(key)
        return self._file.number(name) if key.endswith(_NUMBERS) else self._file.metadata[name]

    def uniform(self, key: str, default: Any = _REQUIRED, field: str | None = None) -> Any:
        """The value of a key that has the same value in all layers; files may repeat it by layer.

        The number of key heads defaults to the number of query heads.
        """
        if key == "attention.head_count_kv" and key not in self:
            key = "attention.head_count"
        value = self(key, default, field)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ValueError(f"expected one value for all layers as {self._prefix}{key}, got {shown(value)}")
        return value[0]

    def expect(self, key: str, *values: Any) -> None:
        """Refuse a file with another value of a key, which may be missing."""
        if (value := self(key, values[0])) not in values:
            expected = " or ".join(map(str, values))
            raise ValueError(f"expected {self._prefix}{key} = {expected}, got {shown(value)}")

    def by_layer(self, key: str, default: Any = _REQUIRED, field: str | None = None) -> list[Any]:
        """The values of a key in all layers; files may have one for all. Raises ``ValueError``: as for a key, or a list
        has another length than layers."""
        value, layers = self(key, default, field), self("block_count")
        if isinstance(value, list) and len(value) != layers:
            raise ValueError(f"expected {layers} values as {self._prefix}{key}, got {len(value)}")
        return value if isinstance(value, list) else [value] * layers

    @property
    def _values(self) -> dict[str, Any]:
        whole = {key: value for key, value in self._file.metadata.items() if key.startswith(self._prefix)}
        return {key.removeprefix(self._prefix): value for key, value in whole.items()}

    def report(self) -> dict[str, str]:
        """What each key was read as: fields of the configuration, "read" with others, or "changes nothing"."""
        keys = sorted(self._values)
        return {key: self.fields[key] or "read" if key in self.fields else "changes nothing" for key in keys}

    def unread(self, harmless: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Keys that were not read and may matter, with their values, without keys in ``HARMLESS``."""
        harmless = HARMLESS if harmless is None else harmless
        return {
            key: value
            for key, value in self._values.items()
            if key not in self.fields and not (key in harmless and harmless[key] in (ANY, value))
        }


_NUMBERS: tuple[str, ...] = ("_epsilon", "freq_base", "freq_base_swa", "factor", "scale", "softcapping", "multiplier")
_NUMBERS += ("beta_fast", "beta_slow", "clamp_kqv")

ANY: Any = object()
HARMLESS: Mapping[str, Any] = {
    "vocab_size": ANY,  # rows of the embedding
    "context_length": ANY,  # of models without positions
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "tensor_data_layout": ANY,
    "rope.scaling.finetuned": ANY,
    "rope.dimension_sections": ANY,  # of images; tokens have one position on all axes
    "n_deepstack_layers": ANY,  # of images
    "attention.causal": True,
    "use_parallel_residual": ANY,
    "pooling_type": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "nextn_predict_layers": 0,
    "logit_scale": 1.0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
}
"""Keys that change nothing, at any value or at the given value."""

Change = Callable[..., Tensor]
"""Converts a file's tensors to a model's weight: (config, *tensors) -> weight."""


@dataclass(frozen=True)
class Rows:
    """A change that only joins tensors and orders their rows, so that quantised rows are kept. ``order``: (config,
    number of rows) -> index of each row in the file; None for the same order."""

    order: Callable[[Any, int], Tensor] | None = None

    def __call__(self, config: Any, *tensors: Tensor) -> Tensor:
        rows = torch.cat(tensors)
        return rows if self.order is None else rows[self.order(config, len(rows))]


def rotary(heads: str) -> Rows:
    """Undoes llama.cpp's order of query and key rows: a pair's rows are adjacent there, half a head apart here."""

    def order(config: Any, rows: int) -> Tensor:
        return torch.arange(rows).view(attrgetter(heads)(config), -1, 2).transpose(1, 2).flatten()

    return Rows(order)


def minus_one(config: Any, weight: Tensor) -> Tensor:
    return weight - 1


def norms_plus_one(names: Names) -> Names:
    """Weights of a decoder whose norms the file stores plus one."""
    norms = {name: (place, minus_one) for name, place in names.items() if "norm" in name and isinstance(place, str)}
    return {**names, **norms}


def log_of_negative(config: Any, weight: Tensor) -> Tensor:
    """``A_log`` of the stored -exp(A_log)."""
    return (-weight).log()


def flat(config: Any, weight: Tensor) -> Tensor:
    return weight.flatten()


def joined_experts(config: Any, *tensors: Tensor) -> Tensor:
    """Joins gate and up projections: (experts, gate rows + up rows, hidden)."""
    return torch.cat(tensors, 1)


def alternating_experts(config: Any, gate: Tensor, up: Tensor) -> Tensor:
    """Joins gates and ups, alternating: (experts, 2 * features) biases, (experts, hidden, 2 * features) weights."""
    return torch.stack([part.mT if part.ndim == 3 else part for part in (gate, up)], -1).flatten(-2)


def transposed_experts(config: Any, weight: Tensor) -> Tensor:
    return weight.mT.contiguous()


STACKED = joined_experts, alternating_experts, transposed_experts
"""Changes that keep the rows of experts' gates, ups and downs."""

Names = dict[str, str | tuple[str, Change | None]]


@dataclass(frozen=True)
class Architecture:
    """How an architecture of llama.cpp is read.

    Attributes:
        model_type: model type of transformers' configuration.
        keys: configuration fields by key.
        names: weight names in a layer by tensor names in a block, without ``weight`` and ``bias``, or with a change of
            the weight. Tensors of one weight are given to its change in the order of the table. A tensor name with its
            ending takes precedence. Of names separated by ``|``, the model has one.
        outer: the same for tensors outside of blocks.
        more: further fields of the configuration; ``model_type`` in place of the row's.
        layers: name of a layer in the model.
        blocks: pattern of names in blocks, before the number.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Names = field(default_factory=dict)
    outer: Names = field(default_factory=lambda: OUTER)
    more: Callable[[Keys], Mapping[str, Any]] = lambda keys: {}
    layers: str = "model.layers.{}"
    blocks: str = r"blk\."


OUTER: Names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def without(table: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: one for key, one in table.items() if key not in names}


PRESENT = {
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias"), "attn_q.bias"),
    **dict.fromkeys(("attention_out_bias", "use_bias"), "attn_output.bias"),
    **dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), "ssm_conv1d.bias"),
    **{"conv_bias": "shortconv.conv.bias", "lm_head_bias": "output.bias", "mlp_bias": "ffn_down.bias"},
    **{"mamba_rms_norm": "ssm_norm.weight", "use_qk_norm": "attn_q_norm.weight"},
    "qk_layernorm": "attn_q_norm.0.weight",
}
"""Fields of configurations that are true if a tensor, of any block, is in the file."""


def expert_keys(count: str, width: str = "moe_intermediate_size") -> dict[str, str]:
    """Keys of routed experts by the configuration's fields for their count and width."""
    return {"expert_count": count, "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": width}


EXPERTS = expert_keys("num_experts")


def mlp(place: str, end: str = "") -> Names:
    """Weights of a gated MLP; ``end`` is the end of the tensors' names."""
    return {f"ffn_{name}{end}": f"{place}.{name}_proj" for name in ("gate", "up", "down")}


def experts(place: str) -> Names:
    """Weights of routed experts, of which gate and up projections are one tensor in the model."""
    joined: Names = {f"ffn_{name}_exps": (f"{place}.gate_up_proj", joined_experts) for name in ("gate", "up")}
    return {**joined, "ffn_gate_up_exps": f"{place}.gate_up_proj", "ffn_down_exps": f"{place}.down_proj"}


ATTENTION: Names = {
    "attn_norm": "input_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
MLP = mlp("mlp")
HEAD_NORMS: Names = {f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
HUNYUAN_NORMS: Names = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
ROUTED: Names = {"ffn_gate_inp": "mlp.gate", **experts("mlp.experts")}
SHARED: Names = {
    "ffn_gate_inp_shexp": ("mlp.shared_expert_gate", lambda config, weight: weight.view(1, -1)),
    **mlp("mlp.shared_expert", "_shexp"),
}
ROTARY: Names = {
    "attn_q": ("self_attn.q_proj", rotary("num_attention_heads")),
    "attn_k": ("self_attn.k_proj", rotary("num_key_value_heads")),
}


def head_size(keys: Keys) -> int:
    """Features of a key head."""
    width: int = keys("embedding_length") // keys.uniform("attention.head_count")
    return int(keys("attention.key_length", width))


def heads(keys: Keys) -> dict[str, Any]:
    """``head_dim``; value heads have the same size."""
    size = head_size(keys)
    if (values := keys("attention.value_length", size)) != size:
        raise ValueError(f"expected value heads of the size of key heads, {size}, got attention.value_length {values}")
    return {"head_dim": size}


def rope(keys: Keys, base: float = 10_000.0) -> dict[str, Any]:
    """``rope_parameters``: base, rotated part of a head, and scaling as llama.cpp applies it."""
    size, rotated = head_size(keys), keys("rope.dimension_count", head_size(keys))
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": keys("rope.freq_base", base)}
    found["partial_rotary_factor"] = _fraction(rotated, size)
    factor = keys("rope.scaling.factor", keys("rope.scale_linear", 0)) or 1.0
    kind = keys("rope.scaling.type", "linear")
    length = keys("rope.scaling.original_context_length", None)
    factors = {f"{name}_factor": keys.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short")}
    attention = keys("rope.scaling.attn_factor", keys("rope.scaling.yarn_attn_factor", None))
    if None not in factors.values():
        found |= {"rope_type": "longrope"} | {name: one[...].tolist() for name, one in factors.items() if one}
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor}
        extras = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found |= {name: keys(f"rope.scaling.{key}") for name, key in extras.items() if f"rope.scaling.{key}" in keys}
    elif kind == "linear" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        raise ValueError(f"expected rope.scaling.type linear, yarn, longrope or none, got {kind!r}")
    if length is not None and found["rope_type"] in ("longrope", "yarn"):
        found["original_max_position_embeddings"] = length
    if attention is not None and found["rope_type"] in ("longrope", "yarn"):
        found["attention_factor"] = attention
    return found


def _fraction(part: int, whole: int) -> float:
    """A number whose product with ``whole``, rounded down, is ``part``."""
    exact = part / whole
    return exact if int(whole * exact) == part else math.nextafter(exact, math.inf)


def sliding(keys: Keys, every: int = 1, window: Any = _REQUIRED) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types``.

    Args:
        every: period of layers with full attention, the last of each period, unless the file lists them.
        window: tokens, unless the file says how many; 0 is full attention in all layers.
    """
    size, pattern = keys("attention.sliding_window", window), keys("attention.sliding_window_pattern", every)
    layers = range(keys("block_count"))
    if isinstance(pattern, list):
        local = [bool(one) for one in keys.by_layer("attention.sliding_window_pattern")]
    else:
        local = [pattern == 0 or layer % pattern < pattern - 1 for layer in layers]
    kinds = ["sliding_attention" if size and slides else "full_attention" for slides in local]
    return {"sliding_window": size or None, "layer_types": kinds}


def decoder(keys: Keys) -> dict[str, Any]:
    """Fields of most decoders beyond their sizes."""
    return {**heads(keys), "rope_parameters": rope(keys)}


def granite(keys: Keys) -> dict[str, Any]:
    """Fields of Granite's decoders."""
    keys.expect("rope.scaling.finetuned", True)  # otherwise without rotary positions
    found = decoder(keys)
    return found | granite_scales(keys, found["head_dim"])


def granite_scales(keys: Keys, size: int) -> dict[str, Any]:
    """Granite's factors of embeddings, residuals, scores and logits; ``size`` is the number of features of a head."""
    return {
        "attention_multiplier": keys("attention.scale", 0.0) or size**-0.5,
        "embedding_multiplier": keys("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys("logit_scale"),
    }
