"""Fields of published ``config.json`` files, checked when read, and names, shapes and vocabularies of tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor
from transformers import GenerationConfig

from mmspec.drafters.spec import LayerShape
from mmspec.errors import UserError
from mmspec.validation import check, condition

Names = Mapping[str, tuple[str, ...]]
"""Maps a module or parameter, with # for a number, to the published names that it stacks: {0} is the first number,
{odd} is 2 * last number + 1, {layers} is the number of layers."""

Parts = Mapping[str, Sequence[str]]
"""Maps a parameter to the published parameters that it stacks."""

EMBEDDING = "embed_tokens.weight"


def layer_names(ours: str, theirs: str, **more: str) -> dict[str, tuple[str, ...]]:
    """Names of a decoder layer's modules under prefixes, plus ``more``."""
    found = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "kv": ("self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "input_norm": ("input_layernorm",),
        "post_norm": ("post_attention_layernorm",),
        **{module: (name,) for module, name in more.items()},
    }
    return {f"{ours}{module}": tuple(f"{theirs}{name}" for name in some) for module, some in found.items()}


def published_names(
    parameters: Iterable[str], names: Names, prefixes: Mapping[str, str] = MappingProxyType({}), layers: int = 1
) -> dict[str, list[str]]:
    """Map each parameter to the published parameters that it stacks."""
    parts: dict[str, list[str]] = {}
    for ours in parameters:
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", ours)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "#", ours)
        module, _, leaf = pattern.rpartition(".")
        given = {"odd": 2 * int(numbers[-1]) + 1 if numbers else 0, "layers": layers}
        if pattern in names:
            some = [name.format(*numbers, **given) for name in names[pattern]]
        elif module in names:
            some = [f"{name.format(*numbers, **given)}.{leaf}" for name in names[module]]
        else:
            some = [ours]
        for before, after in prefixes.items():
            some = [f"{after}{name.removeprefix(before)}" if name.startswith(before) else name for name in some]
        parts[ours] = some
    return parts


def stack(tensors: Mapping[str, Tensor], parts: Parts) -> dict[str, Tensor]:
    """Stack published tensors into parameters."""
    return {
        name: torch.cat([tensors[one] for one in some]) if len(some) > 1 else tensors[some[0]]
        for name, some in parts.items()
    }


def unstack(state: Mapping[str, Tensor], parts: Parts, layer: LayerShape) -> dict[str, Tensor]:
    """Split parameters into published tensors, the inverse of ``stack``. ``layer``: layer shape, to split three parts
    into queries, keys and values; two parts have the same size."""
    inner, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    found: dict[str, Tensor] = {}
    for ours, some in parts.items():
        rows = [inner, keys, keys] if len(some) == 3 else [len(state[ours]) // len(some)] * len(some)
        found |= zip(some, (part.clone() for part in state[ours].split(rows)), strict=True)
    return found


def shapes_of(state: Mapping[str, Tensor], parts: Parts, layer: LayerShape) -> dict[str, tuple[int, ...]]:
    """Shapes of the published tensors; arguments as for ``unstack``."""
    return {name: tuple(tensor.shape) for name, tensor in unstack(state, parts, layer).items()}


def pair_halves(tensors: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Permute query and key features of heads of ``size`` from adjacent pairing to half pairing for rotary positions;
    attention scores stay the same."""
    order = torch.arange(size).view(-1, 2).t().flatten()
    permuted = re.compile(r"\.self_attn\.[qk]_(proj|norm)\.(weight|bias)$")
    return {
        name: tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        if permuted.search(name) and len(tensor) % size == 0
        else tensor
        for name, tensor in tensors.items()
    }


def draft_tokens(tensors: Mapping[str, Tensor], draft: int, vocab: int, where: str) -> Tensor | None:
    """Target token of each of ``draft`` draft tokens, from ``d2t``; None for the identity."""
    if "d2t" not in tensors or tensors["d2t"].device.type == "meta":
        return None
    ids = torch.arange(draft) + tensors["d2t"].long()
    if bool(((ids < 0) | (ids >= vocab)).any()) or len(ids.unique()) < draft:
        raise UserError(f"{where}: i + d2t[i] must be distinct tokens below {vocab}")
    if "t2d" in tensors:
        marked = tensors["t2d"].bool()
        if int(marked.sum()) != draft or not bool(marked[ids].all()):
            raise UserError(f"{where}: t2d must mark exactly the tokens i + d2t[i]: it marks {int(marked.sum())}")
    return None if draft == vocab and bool((tensors["d2t"] == 0).all()) else ids


def rows_of(tensors: Mapping[str, Tensor], name: str) -> int | None:
    return tensors[name].shape[0] if name in tensors and tensors[name].dim() == 2 else None


REQUIRED = object()
"""Marks a field without a default."""

_UNSET = Annotated[Any, condition("unset or false", lambda value: not value)]
_ROPES = ("rope_parameters", "rope_scaling", "rope_theta")
_LAYER = {
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
"""Fields of a ``LayerShape``, and their names in configurations of transformers."""

INERT = re.compile(
    "|".join(GenerationConfig().to_dict())
    + r"""
    # origin and tokens
    | _?name_or_path | base_model_name.* | architectures | auto_map | modal_type | .*(model_type|version)
    | (torch_)?dtype | torchscript | use_bfloat16 | _?attn_impl\w* | .*token_(ids?|index) | id2label | label2id
    # training and use
    | .*dropout.* | initializer_.* | pretraining_tp | embed_requires_grad | (max|num)_anchors | confidence_head_alpha
    | .*loss_.* | (un)?freeze_.* | tune_.* | gradient_checkpointing\w* | (use_)?return_dict | use_cache
    | output_(attentions|hidden_states) | problem_type | chunk_size_feed_forward | is_(encoder_)?decoder
    | speculators_config | parallel_draft_step | runtime_block_size
    # what tensors show, and what only targets have
    | max_(position_embeddings|window_layers|sequence_length|seq_len) | num_target_layers | target_hidden_size
    | (use_)?sliding_window | layer_types | tie_\w*embeddings? | has_lm_head | num_eagle_features | next_layer_regular
    | ((attention|mlp|qkv|fc|conv|lm_head|(add_swa_)?attention_sink)_)?bias
    | use_(aux_hidden_state|input_layernorm_in_first_layer|last_layernorm)
    | ((use_)?mm|image|video|vision|audio|mtp|moe|mamba|linear_(num|key|value|conv))_.* | .*expert.* | text_config
    | attn_output_gate | output_gate_type | full_attention_interval | decoder_sparse_step | mlp_only_layers
    | norm_topk_prob
    # rotary positions, of which each kind reads its own
    | (rope_)?type | rope_theta | (attention_)?factor | beta_(fast|slow) | mscale\w* | truncate | finetuned | mrope_\w+
    | original_max_position_embeddings | (low|high)_freq_factor
    """,
    re.VERBOSE,
)
"""Fields of published configurations that do not affect the network's outputs."""


class Source:
    """A published checkpoint, of which a layout reads the fields.

    Args:
        prefix: optional prefix of field names.
        nested: nested objects of ``config.json``, whose fields override top-level fields.

    Attributes:
        fields: flattened contents of ``config.json``: nested objects merged, prefixes removed.
        halves: whether rotary positions rotate the halves of a head, not adjacent features together.
    """

    halves = True

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, nested: tuple[str, ...], where: str
    ) -> None:
        self.config, self.tensors, self.where = config, dict(tensors), where
        self._prefix, self._known, self._inside = prefix, {*_ROPES}, {*nested, *_ROPES}
        self.fields = {name.removeprefix(prefix): value for name, value in config.items()}
        for name in nested:
            inside = config.get(name) or {}
            if not isinstance(inside, Mapping):
                raise UserError(f"{where}/config.json: {name} must be an object: got {inside!r}")
            self.fields |= inside

    def first(self, *names: str) -> tuple[str, Any]:
        """The first of these fields that is set, and its value; the value is None if no field is set.

        A dot denotes a field of a nested object.
        """
        self.ignore(*names)
        for name in names:
            value: Any = self.fields
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None and value != []:
                return name, value
        return names[0], None

    def get(self, *names: str, kind: Any = Any, default: Any = REQUIRED) -> Any:
        """Validated value of the first of these fields that is set, otherwise the default."""
        name, value = self.first(*names)
        return default if value is None and default is not REQUIRED else self.check(name, kind, value)

    def count(self, *names: str, default: Any = REQUIRED) -> Any:
        """A field with a positive whole number."""
        return self.get(*names, kind=PositiveInt, default=default)

    def vocabulary(self, name: str = "vocab_size", default: Any = None) -> int | None:
        return self.get(name, kind=Annotated[int, Interval(ge=1, le=2**24)], default=default)

    def flag(self, *names: str, default: bool) -> bool:
        return self.get(*names, kind=bool, default=default)

    def refuse(self, *names: str) -> None:
        """Require that fields are unset or false."""
        for name in names:
            self.get(name, kind=_UNSET, default=None)

    def ignore(self, *names: str) -> None:
        """Mark fields as read."""
        for name in names:
            *inside, last = name.split(".")
            self._inside.update(inside)
            self._known |= {*inside, last}

    def layer_ids(self, *names: str, default: Any = REQUIRED, shifted: Collection[str], by: int) -> list[int]:
        """A list of layers; those under ``shifted`` names are shifted by ``by``."""
        name, found = self.first(*names)[0], self.get(*names, kind=list[int], default=default)
        return [layer + by for layer in found] if name in shifted else found

    def layer(self) -> dict[str, Any]:
        """Fields of a ``LayerShape``."""
        width, heads = self.count("hidden_size"), self.count("num_attention_heads")
        self.get("hidden_act", kind=Literal["silu"], default="silu")
        self.halves = self.flag("rope_is_neox_style", "is_neox_style", default=True)
        return {
            "hidden_size": width,
            "heads": heads,
            "kv_heads": self.count("num_key_value_heads", default=heads),
            "head_dim": self.get("head_dim", default=width // heads),
            "mlp": self.count("intermediate_size"),
            "norm_eps": self.get("rms_norm_eps", kind=PositiveFloat, default=None),
        }

    def rope(self) -> dict[str, Any]:
        """Rotary parameters, as transformers' ``rope_parameters``."""
        rope: dict[str, Any] = {}
        config = self.fields
        for key in ("rope_scaling", "rope_parameters"):
            rope |= config[key] if isinstance(config.get(key), dict) else {}
        kind = rope.pop("type", None)
        kind = rope.pop("rope_type", None) or kind or "default"
        given = (
            config.get("rope_theta"),
            rope.get("rope_theta"),
            1e6 if config.get("model_type") == "qwen2_vl" else 1e4,
        )
        theta = self.check("rope_theta", PositiveFloat, next(theta for theta in given if theta is not None))
        if kind not in ("default", "mrope") and config.get("max_position_embeddings"):
            rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        return {**rope, "rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta}

    def check(self, name: str, kind: Any, value: Any) -> Any:
        return check(f"{self.where}/config.json: {name}", kind, value)

    def check_all_read(self, title: str) -> None:
        """Check that no ignored field may affect outputs; values 0, 1, false and empty are accepted. Raises
        ``UserError``: a field was not read and is not listed in ``INERT``."""

        def unread(config: Mapping[str, Any]) -> Iterable[str]:
            for name, value in config.items():
                bare, neutral = name.removeprefix(self._prefix), not value or (value == 1 and value is not True)
                if bare in self._inside and isinstance(value, Mapping):
                    yield from unread(value)
                elif not (bare in self._known or INERT.fullmatch(name) or neutral):
                    yield f"{name} {value!r:.60}"

        if found := list(unread(self.config)):
            raise UserError(
                f"{self.where}/config.json: expected {title} whose fields are known, received {', '.join(found)}: "
                "remove fields that its network does not use"
            )

    def rows(self, *names: str) -> int:
        """Maximum number of rows of the named tensors; 0 if all are absent."""
        return max((rows_of(self.tensors, name) or 0 for name in names), default=0)

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.tensors)

    def named(self, part: str) -> bool:
        """Whether the name of a class or algorithm contains ``part``."""
        return any(part in name for name in class_names(self.config, self.fields.get("projector_type")))


@dataclass
class Reading:
    """Content of a checkpoint, read by its layout.

    Attributes:
        network: fields of the network's configuration; None is the field's default.
        vocab: vocabulary of the target, if known.
        draft: rows of ``d2t``; 0 for layouts without this tensor.
        draft_ids: target token of each draft token, (n,) int64, of layouts without ``d2t``.
        prefixes: replacement tensor prefixes, for checkpoints with such tensors.
        copies: unused copies of the target's tensors, besides the layout's; ``required`` copies must be present.
    """

    network: dict[str, Any]
    names: Names
    vocab: int | None
    draft: int = 0
    draft_ids: Tensor | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


@dataclass
class Writing:
    """A drafter in the format of another engine: ``config.json``, tensor names and prefixes, and the weights file."""

    config: dict[str, Any]
    names: Names
    prefixes: Mapping[str, str] = field(default_factory=dict)
    file: str = "model.safetensors"


def class_names(config: Mapping[str, Any], *more: Any) -> list[str]:
    """Lower-case names of a configuration's classes and algorithm."""
    named = [*(config.get("architectures") or []), config.get("speculators_model_type"), *more]
    return [str(name).lower() for name in named if name]


def written_layer(network: Any, target: Any, model_type: str) -> dict[str, Any]:
    """Decoder layer fields of a transformers configuration, without rotary positions. ``target``: transformers
    configuration of the target."""
    decoder = target.get_text_config()
    limit = getattr(decoder, "max_position_embeddings", None)  # absent with ALiBi
    return {
        **{theirs: getattr(network, ours) for ours, theirs in _LAYER.items()},
        **({"max_position_embeddings": limit} if limit else {}),
        "model_type": model_type,
        "num_hidden_layers": getattr(network, "layers", 1),
        "vocab_size": decoder.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def written_speculators(algorithm: str, target: Any, tokens: int) -> dict[str, Any]:
    """Fields common to all drafters in the format of vllm-project/speculators."""
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy"}
    return {
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "speculative_tokens": tokens, "verifier_accept_k": 1}],
            "verifier": {"architectures": target.architectures or [], "name_or_path": target.name_or_path},
        },
        "speculators_model_type": algorithm,
        "tie_word_embeddings": False,
    }
