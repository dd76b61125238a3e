"""Tensors of published drafters: names, shapes and draft vocabularies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from mmspec.drafters.shape import LayerShape
from mmspec.errors import UserError

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
    """Split parameters into published tensors, the inverse of ``stack``.

    Args:
        layer: layer shape, to split three parts into queries, keys and values; two parts have the same size.
    """
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
