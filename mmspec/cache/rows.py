"""Tensors with one row per sequence, for continuous batching."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.ops.transfer import on_device


def batch_bucket(rows: int) -> int:
    """Padded batch size for static shapes: the next power of two."""
    return 1 << (rows - 1).bit_length() if rows else 0


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Pad ``x``, (batch, ...), to ``rows`` rows with 0."""
    if len(x) == rows:
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows - len(x)))


def row_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Row numbers as an index tensor, (rows,) int64."""
    return on_device(list(rows), device) if rows else torch.empty(0, dtype=torch.long, device=device)


class RowTensor:
    """Tensor with one row per sequence along its first axis.

    Args:
        static_shapes: preallocate for static shapes: ``data`` then has a power of two of rows, with 0 in idle rows, and
            is only reallocated to grow.

    Attributes:
        data: (rows, ...), or (capacity, ...) in place; empty before the first ``append``.
        version: replaced whenever ``data`` is reallocated.
    """

    def __init__(self, static_shapes: bool = False) -> None:
        self.static_shapes = static_shapes
        self.data = torch.empty(0, dtype=torch.float32)
        self.rows = 0
        self.version = object()

    def append(self, new: Tensor) -> None:
        """Append rows for new sequences, (new rows, ...)."""
        rows = self.rows + len(new)
        if not self.static_shapes:
            self.data = torch.cat([self.data, new]) if self.rows else new.clone()
        else:
            old = self.data
            alike = (old.shape[1:], old.dtype, old.device) == (new.shape[1:], new.dtype, new.device)
            if not alike or len(old) < rows:
                self.data = new.new_zeros(batch_bucket(rows), *new.shape[1:])
                if self.rows:
                    self.data[: self.rows] = old[: self.rows]
                self.version = object()
            self.data[self.rows : rows] = new
        self.rows = rows

    def write(self, new: Tensor) -> None:
        """Set all rows, (rows, ...); in place, ``new`` may include idle rows."""
        if self.static_shapes:
            self.data[: len(new)].copy_(new)
        else:
            self.data = new

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if list(rows) != list(range(self.rows)):
            kept = self.data[row_index(rows, self.data.device)]
            if self.static_shapes:
                self.data[len(rows) : self.rows] = 0
                self.data[: len(rows)] = kept
            else:
                self.data = kept
        self.rows = len(rows)
