"""Entries of a batch's rows: packing those that are kept, and gathering some."""

from __future__ import annotations

from torch import Tensor


def packing(kept: Tensor, left: bool) -> tuple[Tensor, Tensor]:
    """Gather indices that pack the kept entries of each row.

    Args:
        kept: (batch, entries) bool.
        left: pad shorter rows on the left, else on the right.

    Returns:
        (batch, most) int64, entry at each new position, in order; (batch, most) bool, False at padding.
    """
    most = int(kept.sum(1).max())
    order = (kept if left else ~kept).int().sort(dim=1, stable=True).indices
    order = order[:, kept.shape[1] - most :] if left else order[:, :most]
    return order, kept.gather(1, order)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Gather entries of each row: (batch, entries, hidden), (batch, taken) int64 -> (batch, taken, hidden)."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
