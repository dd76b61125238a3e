"""Attention masks of trees for transformers' decoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.cache.tree_cache import TreeCache

SLIDING = ("sliding_attention", "hybrid_sliding")
"""Kinds of layers with a sliding window."""


def tree_mask(
    config: Any, cache: TreeCache, depth: Tensor | None, tail_depth: Tensor | None, reach: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None] | None:
    """The ``attention_mask`` of a verify pass.

    Args:
        config: the text configuration, which has the kinds of layers, window and attention implementation.
        cache: cache of the committed prefix.
        depth: (batch, nodes) int64, distance of each new node to the end of the prefix; None means 0.
        tail_depth: (batch, earlier) int64, ``depth`` of uncommitted nodes of earlier passes; None without any.
        reach: (batch, nodes, earlier + nodes) bool, the uncommitted nodes that each new node attends to.
        dtype: dtype of additive masks.

    Returns:
        (batch, 1, nodes, slots): bool, or additive for eager attention, which silently misreads bool masks. A dict if
        the model has several kinds of layers. None if a single node attends to everything, or the model has no
        attention.
    """
    batch, nodes = reach.shape[:2]
    kinds, window = _windows(config)
    chunk = config.attention_chunk_size if "chunked_attention" in kinds else None
    limited = window is not None or chunk is not None
    all_allowed = nodes == 1 and tail_depth is None and not cache.padded
    if (all_allowed and not limited) or not cache.attending:
        return None
    prefix = cache.attended[:, None, :].to(reach.device) if cache.padded else reach.new_ones(1, 1, 1)
    full = torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]
    additive = dtype if config._attn_implementation == "eager" else None
    if not limited:
        return _in_form(full, additive)
    if depth is None:
        depth = torch.zeros(batch, nodes, dtype=torch.long, device=reach.device)
    positions = slot_positions(cache, depth, tail_depth)
    query, key = positions[:, None, -nodes:, None], positions[:, None, None]
    # A single node needs its window too: in some models (Moshi, OLMoE) only transformers' cache applies it.
    masks = {"full_attention": None if all_allowed else _in_form(full, additive)}
    if window is not None:
        masks["sliding_attention"] = _in_form(full & (query - key < window), additive)
    if chunk is not None:
        masks["chunked_attention"] = _in_form(full & (query // chunk == key // chunk), additive)
    return _by_kind(masks) if kinds else masks["sliding_attention"]


def tail_mask(
    config: Any, depth: Tensor, tail_depth: Tensor | None, reach: Tensor
) -> Tensor | dict[str, Tensor | None]:
    """The ``attention_mask`` of a verify pass with static shapes: uncommitted nodes only; see ``tree_mask``.

    Returns:
        (batch, 1, nodes, earlier + nodes) bool; a dict if the model has several kinds of layers.
    """
    full = reach[:, None]
    kinds, window = _windows(config)
    if window is None:
        return full
    tail = depth if tail_depth is None else torch.cat([tail_depth, depth], dim=1)
    slid = full & (depth[:, :, None] - tail[:, None, :] < window)[:, None]
    return _by_kind({"full_attention": full, "sliding_attention": slid}) if kinds else slid


def window_of(config: Any, layer: int) -> int | None:
    """Size of a layer's sliding window; None for full attention."""
    kinds, window = _windows(config)
    return window if window is None or not kinds or kinds[layer] in SLIDING else None


def slot_limit(config: Any) -> int | None:
    """Maximum slots of a prompt with inner or right padding: in longer prompts, transformers' windows and chunks, which
    count padding, differ from tree masks. None if no layer has windows or chunks."""
    kinds, window = _windows(config)
    chunk = config.attention_chunk_size if "chunked_attention" in kinds else None
    return min((size for size in (window, chunk) if size is not None), default=None)


def _windows(config: Any) -> tuple[list[str], int | None]:
    """Kinds of a model's layers (empty if the configuration has none) and size of the sliding window."""
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    return kinds, None if kinds and not set(SLIDING) & set(kinds) else window


def _by_kind(masks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Add masks under the other names that decoders use: for layers with both convolution and attention, and for layers
    without attention."""
    beside = {"hybrid": masks["full_attention"], "hybrid_sliding": masks.get("sliding_attention")}
    return {"linear_attention": None, "conv": None, **beside, **masks}


def slot_positions(cache: TreeCache, depth: Tensor, tail_depth: Tensor | None) -> Tensor:
    """Position of each slot in its sequence, (batch, slots) int64, padding not counted. The nodes are the last slots.

    Args:
        cache, depth, tail_depth: as for ``tree_mask``.
    """
    ends = torch.tensor(cache.lengths, dtype=torch.long, device=depth.device)[:, None]
    tail = depth if tail_depth is None else torch.cat([tail_depth, depth], dim=1)
    slots = torch.arange(cache.length, device=depth.device).expand(depth.shape[0], -1)
    return torch.cat([slots, ends + tail], dim=1)


def _in_form(allowed: Tensor, additive: torch.dtype | None) -> Tensor:
    if additive is None:
        return allowed
    return torch.zeros(allowed.shape, dtype=additive, device=allowed.device).masked_fill(
        ~allowed, torch.finfo(additive).min
    )
