"""Attention of a tree's nodes: to all that is committed, and to their own ancestors behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.ops import kernels


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begin: Tensor,
    end: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    start: Tensor | None = None,
    depth: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention of new nodes to their row's prefix and to marked slots of a tail.

    Slots outside a row's prefix and the tail are never read, whatever stands there. The kernel has no mask over the
    prefix, reads each key and value once for all heads of a group, and sums in float32.

    Args:
        query: (batch, heads, nodes, head_dim) float16, bfloat16 or float32.
        key: (batch, kv_heads, slots, head_dim); consecutive heads share one of ``kv_heads``.
        value: as ``key``.
        begin: (batch,) int, a row's prefix is the slots ``begin <= slot < end``; it may be empty.
        end: (batch,) int.
        mask: (batch, nodes, tail) bool, which slots of the tail each node attends to; one at least.
        scale: of the scores; None means ``head_dim ** -0.5``.
        start: (1,) int, the slot of the tail's first node; None means that the tail is the last slots.
        depth: (batch, nodes) int, distance of each node to the end of its prefix; only needed with a window.
        window: a node attends to the slots of its prefix that are less than so many tokens before it. The tail is
            governed by ``mask`` alone.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        (batch, nodes, heads, head_dim), contiguous, in the precision of ``query``.

    Raises:
        ValueError: shapes disagree, or a window without depths.

    Source: splits of the prefix merged by their log-sum-exp: FlashDecoding (pytorch.org/blog/flash-decoding) over the
    online softmax of FlashAttention (arXiv 2205.14135).
    """
    batch, heads, nodes, head_dim = query.shape
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != head_dim or heads % key.shape[1]:
        raise ValueError(
            "keys and values must be (batch, kv_heads, slots, head_dim), kv_heads dividing heads: "
            f"got {tuple(key.shape)} and {tuple(value.shape)} for queries {tuple(query.shape)}"
        )
    if mask.shape[:2] != (batch, nodes) or begin.shape != (batch,) or end.shape != (batch,):
        raise ValueError(
            f"begin and end must be (batch,), mask (batch, nodes, tail) for queries {tuple(query.shape)}: "
            f"got {tuple(begin.shape)}, {tuple(end.shape)} and {tuple(mask.shape)}"
        )
    if window is not None and depth is None:
        raise ValueError("a window needs the depth of each node: expected (batch, nodes), got None")
    scale = head_dim**-0.5 if scale is None else scale
    if kernels.in_use(query.device) == "triton":
        from mmspec.ops import triton_attention

        return triton_attention.tree_attention(
            query, key, value, begin, end, mask, scale, start, depth if window is not None else None, window, softcap
        )
    allowed = _allowed(key.shape[2], begin, end, mask, start, depth, window)
    # Zeros, as what is not attended to may be anything, and nothing times NaN is NaN.
    used = allowed.any(1)[:, None, :, None]
    keys, values = (torch.where(used, x, 0.0).float() for x in (key, value))
    grouped = query.float().unflatten(1, (key.shape[1], -1))  # (batch, kv_heads, group, nodes, head_dim)
    scores = grouped @ keys[:, :, None].transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~allowed[:, None, None], -torch.inf).softmax(-1)
    return (weights @ values[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous().to(query.dtype)


def _allowed(
    slots: int, begin: Tensor, end: Tensor, mask: Tensor, start: Tensor | None, depth: Tensor | None, window: int | None
) -> Tensor:
    """(batch, nodes, slots) bool."""
    batch, nodes, tail = mask.shape
    slot = torch.arange(slots, device=mask.device).expand(batch, nodes, -1)
    last = end[:, None, None]
    allowed = (slot >= begin[:, None, None]) & (slot < last)
    if window is not None:
        assert depth is not None
        allowed &= slot > last + depth[:, :, None] - window
    first = slots - tail if start is None else start
    place = (torch.arange(tail, device=mask.device) + first).expand(batch, nodes, -1)
    return allowed.scatter(2, place, mask)
