"""Published tensors as parts of the parameters that stack them, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.drafters.shape import LayerShape
from mmspec.errors import UserError


def parameters(kind: Callable[[Any], nn.Module], config: Any) -> dict[str, Tensor]:
    """Parameters of a network of class ``kind``, on the meta device."""
    with torch.device("meta"):
        return kind(config).state_dict()


def stack(tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Our parameters, each from the published tensors that it stacks."""
    return {
        name: torch.cat([tensors[one] for one in some]) if len(some) > 1 else tensors[some[0]]
        for name, some in parts.items()
    }


def unstack(state: Mapping[str, Tensor], parts: Mapping[str, Sequence[str]], layer: LayerShape) -> dict[str, Tensor]:
    """Published tensors from our parameters, the inverse of ``stack``.

    Args:
        layer: shape of layers with three parts: queries, keys and values; two parts are of the same size.
    """
    inner, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    found: dict[str, Tensor] = {}
    for ours, some in parts.items():
        rows = [inner, keys, keys] if len(some) == 3 else [len(state[ours]) // len(some)] * len(some)
        found |= zip(some, (part.clone() for part in state[ours].split(rows)), strict=True)
    return found


def shapes_of(
    state: Mapping[str, Tensor], parts: Mapping[str, Sequence[str]], layer: LayerShape
) -> dict[str, tuple[int, ...]]:
    """Shapes of the published tensors; arguments as for ``unstack``."""
    return {name: tuple(tensor.shape) for name, tensor in unstack(state, parts, layer).items()}


def check_tensors(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    what: str,
    source: str,
    optional: Collection[str] = (),
    integers: Collection[str] = (),
) -> None:
    """Check that there are exactly the tensors of a published layout.

    Args:
        what: the layout, in messages.
        optional: those that may be missing.
        integers: those that are integers or boolean; the others are floating point.

    Raises:
        UserError: a tensor is missing, unknown, or of another shape or type.
    """
    harmless = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}  # of old releases of transformers
    missing = sorted(shapes.keys() - tensors.keys() - set(optional))
    unknown = sorted(tensors.keys() - shapes.keys() - harmless)
    if missing or unknown:
        found = [f"{what} {', '.join(some)}" for what, some in (("missing", missing), ("unknown", unknown)) if some]
        raise UserError(f"{source}: expected exactly the tensors of {what}, received {'; '.join(found)}")
    for name in sorted(shapes.keys() & tensors.keys()):
        tensor = tensors[name]
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"{source}: {name} must be {shapes[name]} by config.json: got {tuple(tensor.shape)}")
        floating = tensor.is_floating_point() and tensor.element_size() > 1  # float8 means nothing without its scales
        if floating == (name in integers):
            kind = "an integer or boolean" if name in integers else "a floating point"
            raise UserError(f"{source}: {name} must be {kind} tensor: got {tensor.dtype}")


def rows_of(tensors: Mapping[str, Tensor], name: str) -> int | None:
    return tensors[name].shape[0] if name in tensors and tensors[name].dim() == 2 else None
