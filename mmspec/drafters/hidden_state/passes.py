"""Passes of a drafter's layers over new entries and its KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.tree_cache import TreeCache
from mmspec.drafters.hidden_state.layer import Rotation


def allowed_slots(cache: TreeCache, reach: Tensor, window: int = 0) -> Tensor:
    """Attention mask, (batch, 1, nodes, slots) bool: ``reach``, after the prefix unless shapes are static.

    Args:
        reach: (batch, nodes, new) bool, the new entries that each node attends to, itself included.
        window: see ``HiddenStateDrafter.window``.
    """
    if cache.static_shapes:
        return reach[:, None]
    batch, nodes = reach.shape[:2]
    prefix = cache.attended[:, None, :] if cache.padded else reach.new_ones(1, 1, 1)
    if window:
        lengths = torch.tensor(cache.lengths, device=reach.device)[:, None, None]
        at = lengths + _depth(reach)[..., None]
        prefix = prefix & (at - torch.arange(cache.length, device=reach.device) < window)
    return torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]


def _depth(reach: Tensor) -> Tensor:
    """(batch, nodes) int64, entries between each node and the prefix: those that it attends to, but itself."""
    return reach.sum(-1) - 1


def run(
    network: Any, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache, window: int = 0
) -> Tensor:
    """Run a network on new entries and write them to the cache.

    Args:
        network: takes inputs, rotation and attention.
        x: (batch, nodes, any), inputs.
        allowed: attention mask, see ``allowed_slots``; None for a prompt without padding.
        window: of static shapes, whose mask has no prefix; see ``HiddenStateDrafter.window``.

    Returns:
        The network's outputs, (batch, nodes, any).
    """
    if cache.static_shapes:
        cache.set_write_slots(x.shape[1])

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        entry: Any = cache.layers[layer]
        keys, values = entry.update(k, v)
        if cache.static_shapes:
            assert cache.bounds is not None
            assert allowed is not None
            bounds = cache.bounds.first(len(q))
            reach = allowed[:, 0]
            slides: dict[str, Any] = {"depth": _depth(reach), "window": window} if window else {}
            read = ops.tree_attention(q, keys, values, bounds.lengths, reach, start=bounds.start, **slides)
            return read.transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, values, allowed, is_causal=allowed is None, enable_gqa=True)

    return network(x, rotation, attend)
