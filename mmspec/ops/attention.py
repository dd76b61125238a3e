"""Tree attention: nodes attend to the committed prefix and to their own ancestors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.ops import kernels


def _check(query: Tensor, key: Tensor, value: Tensor, prefix: Tensor, mask: Tensor, **options: Any) -> None:
    batch, heads, nodes, head_dim = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or key.shape[3] != head_dim or heads % key.shape[1]:
        raise ValueError(
            "keys and values must be (batch, kv_heads, slots, head_dim), kv_heads dividing heads: "
            f"got {tuple(key.shape)} and {tuple(value.shape)} for queries {tuple(query.shape)}"
        )
    if mask.shape[:2] != (batch, nodes) or prefix.shape != (batch,):
        raise ValueError(
            f"prefix must be (batch,) and mask (batch, nodes, tail) for queries {tuple(query.shape)}: "
            f"got {tuple(prefix.shape)} and {tuple(mask.shape)}"
        )
    if options.get("window") is not None and options.get("depth") is None:
        raise ValueError("a window needs the depth of each node: expected (batch, nodes), got None")


@kernels.operation(_check)
def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    start: Tensor | None = None,
    depth: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention of new nodes to their row's prefix and, by mask, to a tail of uncommitted slots.

    Slots outside the prefix and the tail are never read. The kernel has no mask over the prefix, reads each key and
    value once per GQA group, and accumulates in float32.

    Args:
        query: (batch, heads, nodes, head_dim) float16, bfloat16 or float32.
        key: (batch, kv_heads, slots, head_dim); consecutive query heads share a KV head.
        value: (batch, kv_heads, slots, value_dim).
        prefix: (batch,) int, prefix length: a row's prefix is its first ``prefix`` slots; may be 0.
        mask: (batch, nodes, tail) bool, tail slots that each node attends to, at least one.
        scale: softmax scale; default ``head_dim ** -0.5``.
        start: (1,) int, first slot of the tail; None means that the tail is the last slots.
        depth: (batch, nodes) int, distance of each node to the end of its prefix; required with ``window``.
        window: sliding window in tokens, applied to the prefix only; ``mask`` covers the tail.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        (batch, nodes, heads, value_dim), contiguous, in the dtype of ``query``.

    Raises:
        ValueError: shapes disagree, or ``window`` without ``depth``.

    Source: splits of the prefix merged by their log-sum-exp: FlashDecoding (pytorch.org/blog/flash-decoding) over the
    online softmax of FlashAttention (arXiv 2205.14135).
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    allowed = _allowed(key.shape[2], prefix, mask, start, depth, window)
    # Unused slots may hold NaN, and 0 * NaN is NaN.
    used = allowed.any(1)[:, None, :, None]
    keys, values = (torch.where(used, x, 0.0).float() for x in (key, value))
    grouped = query.float().unflatten(1, (key.shape[1], -1))  # (batch, kv_heads, group, nodes, head_dim)
    scores = grouped @ keys[:, :, None].transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~allowed[:, None, None], -torch.inf).softmax(-1)
    return (weights @ values[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous().to(query.dtype)


def _allowed(
    slots: int, prefix: Tensor, mask: Tensor, start: Tensor | None, depth: Tensor | None, window: int | None
) -> Tensor:
    """Attention mask over all slots, (batch, nodes, slots) bool."""
    batch, nodes, tail = mask.shape
    slot = torch.arange(slots, device=mask.device).expand(batch, nodes, -1)
    allowed = slot < prefix[:, None, None]
    if window is not None:
        assert depth is not None
        allowed &= slot > prefix[:, None, None] + depth[:, :, None] - window
    first = slots - tail if start is None else start
    place = (torch.arange(tail, device=mask.device) + first).expand(batch, nodes, -1)
    return allowed.scatter(2, place, mask)
