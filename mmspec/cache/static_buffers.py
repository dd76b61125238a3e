"""Buffers of keys and values of static shapes and addresses: passes over them can be captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.cache.buffers import KVBuffers
from mmspec.cache.rows import batch_bucket
from mmspec.ops import compact_kv
from mmspec.ops.transfer import on_device

_SLOT_MULTIPLE = 256  # requests of similar length get buffers of equal size


@dataclass(frozen=True)
class SlotBounds:
    """Row lengths on the device, updated in place.

    Attributes:
        lengths: (rows,) int64, committed slots of each row; 0 for an idle row.
        start: (1,) int64, the first slot that a pass writes: the greatest length.
    """

    lengths: Tensor
    start: Tensor

    def first(self, rows: int) -> SlotBounds:
        """Views of the first ``rows`` rows."""
        return SlotBounds(self.lengths[:rows], self.start)


class StaticKVBuffers(KVBuffers):
    """``KVBuffers`` of static shapes and addresses.

    Row lengths are device tensors, writes are indexed and whole buffers are returned: every pass of a shape runs the
    same kernels on the same addresses.

    Attributes:
        bounds: row lengths on the device, idle rows included; None before the first row.
    """

    def __init__(self, layers: int, reserve: int) -> None:
        super().__init__(layers, reserve)
        self.bounds: SlotBounds | None = None
        self._write_slots: Tensor | None = None  # (nodes,) of the current pass

    def _zeros(self, tensors: int, rows: int, slots: int, like: Tensor) -> Tensor:
        return super()._zeros(tensors, batch_bucket(rows), slots + -slots % _SLOT_MULTIPLE, like)

    def _grown_slots(self, slots: int, rows: int) -> int:
        grown = super()._grown_slots(slots, rows)
        if grown > self.capacity or rows == self.rows:
            return grown
        return max(slots + 1, self.capacity * self.rows // rows)  # further rows take what is reserved for fewer

    def set_write_slots(self, nodes: int, offset: int) -> None:
        """Set the write slots of the next pass, after ``offset`` uncommitted nodes; part of what is captured."""
        start = self._known_bounds.start
        self._write_slots = start + torch.arange(offset, offset + nodes, device=start.device)

    def write(self, layer: int, states: Sequence[Tensor], start: int) -> list[Tensor]:
        """Write a layer's states to the write slots; returns whole buffers."""
        assert self._write_slots is not None, "set_write_slots comes first"
        buffers = self.layer(layer, states, start)
        for buffer, new in zip(buffers, states, strict=True):
            buffer.index_copy_(2, self._write_slots, new)
        return buffers

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self._move(rows, lengths)  # also without any row, the buffers keep their addresses

    def _drop(self) -> None:
        super()._drop()
        self.bounds = None

    def set_lengths(self, lengths: Sequence[int]) -> None:
        self._write_slots = None
        if not self.tensors and self._layers:
            return
        size = self.rows if self.tensors else batch_bucket(len(lengths))
        if self.bounds is None or len(self.bounds.lengths) < size:
            device = self.tensors[0].device if self.tensors else self.device
            zeros = torch.zeros(size + 1, dtype=torch.long, device=device)
            self.bounds, self.version = SlotBounds(zeros[:-1], zeros[-1:]), object()
        idle = [0] * (len(self.bounds.lengths) - len(lengths))
        self.bounds.lengths.copy_(on_device([*lengths, *idle], self.bounds.lengths.device))
        self.bounds.start.fill_(max(lengths, default=0))

    def commit(self, path: Tensor, rows: list[list[int]], lengths: Sequence[int]) -> None:
        """``commit_on_device``; ``path`` may include idle rows."""
        self.commit_on_device(path)

    def commit_on_device(self, path: Tensor) -> None:
        """Compact the accepted paths and advance the row lengths on the device; can be captured."""
        bounds = self._known_bounds.first(len(path))
        for buffer in self.tensors:
            compact_kv(buffer[:, : len(path)], path, bounds.start, bounds.lengths)
        bounds.lengths.add_((path >= 0).sum(1))
        bounds.start.copy_(bounds.lengths.amax(0, keepdim=True))

    @property
    def _known_bounds(self) -> SlotBounds:
        assert self.bounds is not None, "the prompt comes first"
        return self.bounds
