"""Medusa and Hydra heads, read and written."""

from __future__ import annotations

import re
from dataclasses import asdict
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval
from torch import Tensor

from mmspec.drafters.checkpoint import take_draft_ids
from mmspec.drafters.layouts.fields import Names, Reading, Source, Writing, layer_names, published_names, rows_of
from mmspec.drafters.spec import RotaryShape
from mmspec.errors import UserError

_FEW = Annotated[int, Interval(ge=1, le=64)]
_SIZES = ("hidden_size", "truncated_vocab_size", "max_paths", "topk", "num_lookahead_tokens")  # in the tensors
_PREFIX = "prefix_embeding_layer"  # sic
COPIES = ("input_embed_fn.weight", f"{_PREFIX}.embed_tokens.weight")
_SHARED = ("lm_head.weight", "lm_heads.0.weight")  # of the target, with original_lm_head
_VLLM = {"heads.#.#.linear": ("blocks.{0}.layers.{1}",), "outputs.#": ("lm_heads.{0}",)}
_ORIGINAL = {"heads.#.#.linear": ("{0}.{1}.linear",), "outputs.#": ("{0}.{layers}",)}
_MLP = {
    "heads.#.#.linear": ("hydra_mlp.{0}.{1}.linear",),
    "heads.#.#.residual": ("hydra_mlp.{0}.{1}.res_connection",),
    "outputs.#": ("hydra_lm_head.{0}",),
}
_PREFIX_MLP = {
    "heads.#.#.linear": ("hydra_mlp.{0}.{odd}.linear",),
    "heads.#.#.residual": ("hydra_mlp.{0}.{odd}.res_connection",),
    "outputs.#": ("hydra_lm_head.{0}.1",),
    **layer_names("layers.#.", f"{_PREFIX}.layers.0."),
    "norm": (f"{_PREFIX}.norm",),
}


def read_medusa(source: Source) -> Reading:
    return _read_heads(source, _VLLM if any("blocks." in name for name in source.tensors) else _ORIGINAL)


def read_hydra(source: Source) -> Reading:
    found = _read_heads(source, _PREFIX_MLP if source.fields.get("head_arch") == "prefix-mlp" else _MLP)
    found.network["head"] = max(found.network["head"], 1)
    return found


def _read_heads(source: Source, names: Names) -> Reading:
    source.tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in source.tensors.items()}
    vocab, draft_ids = _take_token_map(source)
    heads = max(source.get("num_heads", kind=_FEW, default=1), _head_count(source, names))
    layers = max(source.get(name, kind=_FEW, default=1) for name in ("num_layers", "num_hidden_layers"))
    has_fc_bias, shares_head = (source.flag(name, default=False) for name in ("fc_bias", "original_lm_head"))
    source.get("logit_scale", kind=Annotated[float, Interval(ge=1, le=1)], default=1.0)
    source.get("head_arch", kind=Literal["mlp", "prefix-mlp"], default="mlp")
    source.get("hidden_state_offset", kind=Literal[0], default=0)
    source.ignore(*_SIZES)

    def rows(parameter: str) -> int:
        """Rows of the heads' parameters; {} is the head's number."""
        parts = published_names(map(parameter.format, range(heads)), names, layers=layers)
        return source.rows(*(name for some in parts.values() for name in some))

    hydra, width = "heads.#.#.residual" in names, max(rows(f"heads.{{}}.{at}.linear.weight") for at in range(layers))
    own = rows("outputs.{}.weight") if hydra or not shares_head else 0
    network = {
        "hidden_size": width,
        "heads": heads,
        "layers": layers,
        "bias": has_fc_bias or names is not _VLLM,
        "grounded": source.flag("grounded_heads", default=False),
        "head": own if draft_ids is None or not own else len(draft_ids),
        "head_bias": hydra,
        "prefix": _prefix_layer(source, width) if names is _PREFIX_MLP else {},
    }
    return Reading(
        network,
        names,
        vocab or network["head"] or None,
        draft_ids=draft_ids,
        copies=_SHARED if shares_head else (),
    )


def _take_token_map(source: Source) -> tuple[int | None, Tensor | None]:
    """Read the vocabulary and vLLM's draft vocabulary, and select its rows from full-size output layers."""
    vocab = source.vocabulary()
    ids = take_draft_ids(source.tensors, vocab or 0, Path(source.where), "token_map")
    for name in source.tensors if ids is not None else ():
        if name.startswith("lm_heads.") and rows_of(source.tensors, name) == vocab:
            source.tensors[name] = source.tensors[name][ids]
    return vocab, ids


def _head_count(source: Source, names: Names) -> int:
    first = names["heads.#.#.linear"][0].partition("{0}")[0]
    found = (re.match(re.escape(first) + r"(\d{1,4})\.", name) for name in source.tensors)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _prefix_layer(source: Source, width: int) -> dict[str, Any]:
    """Shape of Hydra's decoder layer, from its tensors; the head size is the largest that fits, up to 128."""
    parts = ("self_attn.q_proj",), ("self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    names = ([f"{_PREFIX}.layers.0.{one}.weight" for one in some] for some in parts)
    queries, keys, mlp = (max(2, source.rows(*some)) for some in names)
    queries += -queries % keys  # a missing or misshapen tensor raises later
    size = gcd(keys, 128)
    return asdict(RotaryShape(width, queries // size, keys // size, size, mlp))


def write_vllm(network: Any, target: Any, tokens: int) -> Writing:
    _check_written(network)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": network.heads,
        "num_hidden_layers": network.layers,
        "hidden_size": network.hidden_size,
        "medusa_fc_bias": network.bias,
        "truncated_vocab_size": network.head,
        "vocab_size": target.get_text_config().vocab_size,
    }
    return Writing(config, _VLLM)


def write_medusa(network: Any, target: Any, tokens: int) -> Writing:
    """FasterDecoding/Medusa."""
    _check_written(network)
    if not network.bias:
        raise UserError("format medusa requires heads with biases: they have none")
    sizes = {"medusa_num_heads": network.heads, "medusa_num_layers": network.layers}
    config = {"base_model_name_or_path": target.name_or_path, **sizes}
    return Writing(config, _ORIGINAL, file="medusa_lm_head.safetensors")


def _check_written(network: Any) -> None:
    if not network.head:
        raise UserError("formats of Medusa require output layers of the heads' own: they use the target's")
