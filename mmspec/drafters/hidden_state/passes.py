"""Passes of a drafter's layers over new entries and its KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.cache.tree_cache import TreeCache
from mmspec.drafters.hidden_state.layer import Rotation


def allowed_slots(cache: TreeCache, reach: Tensor) -> Tensor:
    """Attention mask, (batch, 1, nodes, slots) bool: ``reach``, after the prefix unless shapes are static."""
    if cache.static_shapes:
        return reach[:, None]
    batch, nodes = reach.shape[:2]
    prefix = cache.attended[:, None, :] if cache.padded else reach.new_ones(1, 1, 1)
    return torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]


def run(network: Any, x: Tensor, rotation: Rotation, allowed: Tensor | None, cache: TreeCache) -> Tensor:
    """Run a network on new entries and write them to the cache.

    Args:
        network: takes inputs, rotation and attention.
        x: (batch, nodes, any), inputs.
        rotation: rotation of their positions.
        allowed: attention mask, see ``allowed_slots``; None for a prompt without padding.
        cache: the KV cache.

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
            read = ops.tree_attention(q, keys, values, bounds.lengths, allowed[:, 0], start=bounds.start)
            return read.transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, values, allowed, is_causal=allowed is None, enable_gqa=True)

    outputs: Tensor = network(x, rotation, attend)
    return outputs
