"""Growable key and value buffers, and their counterpart for static shapes.

Keys and values of the same shape share a buffer (tensors, rows, kv_heads, slots, head_dim). If all layers are alike, a
commit is one gather and one scatter for the whole model. Latent attention (MLA) has a buffer for each of its two
tensors, an indexer has a buffer for its keys, and layers that reuse another layer's keys and values have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from mmspec.cache.rows import batch_bucket, row_index
from mmspec.ops import compact_kv, cpu
from mmspec.ops.transfer import on_device

_LARGE_BYTES = 1 << 26  # above this total size, buffers grow by an eighth instead of doubling
_LEAST_BYTES = 2 * cpu.PAGE  # minimum size of a buffer with huge pages


class KVBuffers:
    """Key and value storage of a ``TreeCache``, which stores the row lengths.

    Args:
        reserve: slots to allocate at first use.

    Attributes:
        version: replaced whenever a buffer is reallocated.
        device: device of the row lengths if no layer has keys and values.
    """

    def __init__(self, layers: int, reserve: int) -> None:
        self.device = torch.device("cpu")
        self.tensors: list[Tensor] = []
        self.version = object()
        self._layers, self._reserve = layers, reserve
        self._used: list[int] = []  # number of tensors in use per buffer
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}  # buffer and tensor index per layer state

    @property
    def capacity(self) -> int:
        """Number of allocated slots."""
        return self.tensors[0].shape[3] if self.tensors else 0

    @property
    def rows(self) -> int:
        return self.tensors[0].shape[1] if self.tensors else 0

    def _zeros(self, tensors: int, rows: int, slots: int, like: Tensor) -> Tensor:
        """A new buffer with the shape, dtype and device of ``like``, (..., kv_heads, any, head_dim)."""
        self.version = object()
        shape = tensors, rows, like.shape[-3], slots, like.shape[-1]
        size = prod(shape) * like.element_size()
        memory = cpu.zeros(size) if like.device.type == "cpu" and size >= _LEAST_BYTES else None
        return like.new_zeros(shape) if memory is None else memory.view(like.dtype).view(shape)

    def allocate(self, rows: int, slots: int, used: int) -> None:
        """Grow the buffers to at least ``rows`` rows and ``slots`` slots, and copy the first ``used`` slots."""
        if not self.tensors:
            return
        # One extra slot serves as a write sink for the padding of ragged commits.
        allocated, capacity = self.rows, self.capacity
        if slots < capacity and rows <= allocated:
            return
        rows = allocated if rows <= allocated else max(rows, self._grown(allocated))
        slots = self._grown_slots(slots, rows)
        for place, old in enumerate(self.tensors):
            grown = self.tensors[place] = self._zeros(len(old), rows, slots, old)
            grown[:, :allocated, :, :used] = old[:, :, :, :used]

    def _grown_slots(self, slots: int, rows: int) -> int:
        """Number of slots for reallocation with ``rows`` rows: at least ``slots`` + 1."""
        return self.capacity if slots < self.capacity else max(slots + 1, self._grown(self.capacity))

    def _grown(self, count: int) -> int:
        """Amortised growth of rows or slots: double, or an eighth more in large buffers."""
        return 2 * count if sum(buffer.nbytes for buffer in self.tensors) < _LARGE_BYTES else count + count // 8

    def layer(self, layer: int, states: Sequence[Tensor], start: int) -> list[Tensor]:
        """Buffers for a layer's states, (rows, kv_heads, slots, head_dim) each, with slots for the next pass.

        Args:
            states: states of the pass, (rows, kv_heads, nodes, head_dim): keys and values, or only an indexer's keys.
            start: first slot of the pass.
        """
        rows, _, count, _ = states[0].shape
        self.allocate(rows, start + count, start)
        place = layer, len(states)
        if place not in self._places:
            alike = self._layers * sum(_kind(state) == _kind(states[0]) for state in states)
            self._places[place] = [self._next_tensor(state, alike, start) for state in states]
        return [self.tensors[buffer][tensor, :rows] for buffer, tensor in self._places[place]]

    def states(self, layer: int) -> list[Tensor]:
        """Keys and values of a layer in all slots, (rows, kv_heads, slots, head_dim) each."""
        return [self.tensors[buffer][tensor] for buffer, tensor in self._places[layer, 2]]

    def write(self, layer: int, states: Sequence[Tensor], start: int) -> list[Tensor]:
        """Write a layer's states of a pass to its slots; arguments as for ``layer``.

        Returns:
            Each state in all slots up to the last written slot.
        """
        end, buffers = start + states[0].shape[2], self.layer(layer, states, start)
        for buffer, new in zip(buffers, states, strict=True):
            buffer[:, :, start:end] = new
        return [buffer[:, :, :end] for buffer in buffers]

    def shared(self, layers: Sequence[int], rows: int, nodes: int, like: Tensor, start: int) -> Tensor:
        """The shared buffer of identical layers, with slots for the next pass, for kernels that write to it.

        Args:
            like: (kv_heads, any, head_dim), template for shape, dtype and device.
        """
        states = like.expand(rows, *like.shape)
        for layer in layers if not self._places else ():
            self.layer(layer, (states, states), start)
        self.allocate(rows, start + nodes, start)
        return self.tensors[0]

    def _next_tensor(self, states: Tensor, alike: int, start: int) -> tuple[int, int]:
        """The next free tensor for keys or values; a new buffer has room for ``alike`` tensors."""
        kinds = [_kind(buffer) for buffer in self.tensors]
        if _kind(states) not in kinds:
            kinds.append(_kind(states))
            rows, _, count, _ = states.shape
            if self.tensors:
                rows, slots = self.rows, self.capacity
            else:
                slots = max(start + count + 1, self._reserve)
            self.tensors.append(self._zeros(alike, rows, slots, states))
            self._used.append(0)
        buffer = kinds.index(_kind(states))
        if self._used[buffer] == len(self.tensors[buffer]):
            self.tensors[buffer] = torch.cat([self.tensors[buffer], torch.zeros_like(self.tensors[buffer])])
        self._used[buffer] += 1
        return buffer, self._used[buffer] - 1

    def commit_prompt(self, kept: Sequence[Tensor] | None) -> None:
        """Remove padding, and free tensors left unused because shapes differ or layers share keys and values.

        Args:
            kept: slots to keep per row; None without padding.
        """
        self.tensors = [
            buffer if used == len(buffer) else buffer[:used].clone()
            for buffer, used in zip(self.tensors, self._used, strict=True)
        ]
        for buffer in self.tensors if kept is not None else ():
            for row, slots in enumerate(kept or ()):
                buffer[:, row, :, : len(slots)] = buffer[:, row, :, slots]

    def append(self, new: KVBuffers, chosen: Sequence[int], lengths: Sequence[int], slots: int, longest: int) -> None:
        """Append rows of other buffers.

        Args:
            chosen: rows of ``new``.
            lengths: lengths of the existing rows.
            slots: maximum slots of the longest row.
            longest: length of the longest new row.
        """
        if not new.tensors:
            return
        first, rows = len(lengths), len(lengths) + len(chosen)
        kinds = [_kind(buffer) for buffer in new.tensors]
        if self.tensors and [_kind(buffer) for buffer in self.tensors] != kinds:
            self._drop()  # the model was moved to another device or dtype
        if not self.tensors:
            size = max(slots + 1, self._reserve)
            self.tensors = [self._zeros(len(buffer), rows, size, buffer) for buffer in new.tensors]
            self._used, self._places = new._used[:], dict(new._places)
        self.allocate(rows, slots, max(lengths, default=0))
        whole = list(chosen) == list(range(len(chosen)))
        for own, source in zip(self.tensors, new.tensors, strict=True):
            taken = source[:, : len(chosen)] if whole else source[:, row_index(chosen, source.device)]
            own[:, first:rows, :, :longest] = taken[:, :, :, :longest]

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep these rows, in this order; free the others' slots."""
        if rows:
            self._move(rows, lengths)
        else:
            self._drop()

    def _move(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        length = max(lengths, default=0)
        moved = any(new > old for new, old in enumerate(rows))
        for buffer in self.tensors:
            if moved:
                index = row_index(rows, buffer.device)
                buffer[:, : len(rows), :, :length] = buffer[:, index, :, :length]
                continue
            for new, old in enumerate(rows):  # rows only move to lower, already freed indices
                if new != old:
                    buffer[:, new, :, : lengths[old]] = buffer[:, old, :, : lengths[old]]

    def _drop(self) -> None:
        """Free the buffers."""
        self.tensors, self._used, self._places = [], [], {}

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Update row lengths after rows were added, removed or truncated."""

    def commit(self, path: Tensor, rows: list[list[int]], lengths: Sequence[int]) -> None:
        """Compact the accepted path of each row to the end of its prefix.

        Args:
            path: (batch, depth) int64, node indices padded with -1; node i is i slots after the end of the longest row.
            rows: the paths as lists without padding; an empty list leaves its row unchanged.
        """
        if not self.tensors:
            return
        start, longest = max(lengths), max(map(len, rows))
        if all(n == start for n in lengths) and all(r == list(range(len(r))) for r in rows):
            return  # already in place
        path = path[:, :longest]
        if len(rows) == 1:
            slot = lengths[0]
            for buffer in self.tensors:
                buffer[:, :1, :, slot : slot + longest] = buffer[:, :1, :, start + path[0].to(buffer.device)]
            return
        steps = torch.arange(longest, device=path.device)
        ends = torch.tensor(lengths, dtype=torch.long, device=path.device)[:, None]
        target = torch.where(path >= 0, ends + steps, self.capacity - 1)
        source = start + path.clamp(min=0)
        row = torch.arange(len(rows), device=path.device)[:, None]
        for buffer in self.tensors:  # buffers may be on different devices
            here, to, at = (index.to(buffer.device) for index in (row, target, source))
            buffer[:, here, :, to] = buffer[:, here, :, at]


def _kind(states: Tensor) -> tuple[Any, ...]:
    """Properties shared by the tensors of a buffer: shape, dtype and device."""
    return states.shape[-3], states.shape[-1], states.dtype, states.device


_SLOT_MULTIPLE = 256  # requests of similar length get buffers of equal size


@dataclass(frozen=True)
class SlotBounds:
    """Row lengths on the device, updated in place.

    Attributes:
        lengths: (rows,) int64, committed slots of each row; 0 for an idle row.
        start: (1,) int64, first slot that a pass writes: the maximum length.
    """

    lengths: Tensor
    start: Tensor

    def first(self, rows: int) -> SlotBounds:
        """Views of the first ``rows`` rows."""
        return SlotBounds(self.lengths[:rows], self.start)


class StaticKVBuffers(KVBuffers):
    """``KVBuffers`` of static shapes and addresses.

    Row lengths are device tensors, writes are indexed, and reads return whole buffers, so that all passes of a shape
    run the same kernels on the same addresses.

    Attributes:
        bounds: row lengths on the device, including idle rows; None before the first row.
    """

    def __init__(self, layers: int, reserve: int) -> None:
        super().__init__(layers, reserve)
        self.bounds: SlotBounds | None = None
        self._write_slots: Tensor | None = None  # (nodes,) slots of the current pass

    def _zeros(self, tensors: int, rows: int, slots: int, like: Tensor) -> Tensor:
        return super()._zeros(tensors, batch_bucket(rows), slots + -slots % _SLOT_MULTIPLE, like)

    def _grown_slots(self, slots: int, rows: int) -> int:
        grown = super()._grown_slots(slots, rows)
        if grown > self.capacity or rows == self.rows:
            return grown
        return max(slots + 1, self.capacity * self.rows // rows)  # keep the total size when rows are added

    def set_write_slots(self, nodes: int, offset: int) -> None:
        """Set the write slots of the next pass, after ``offset`` uncommitted nodes. Captured."""
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
        self._move(rows, lengths)  # without rows, too: the buffers keep their addresses

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

    def advance_on_device(self, length: Tensor) -> None:
        """``commit_on_device`` for the first ``length`` nodes, (1,) int64, of a single row, without compaction."""
        bounds = self._known_bounds
        for count in (bounds.lengths[:1], bounds.start):
            count.add_(length)

    @property
    def _known_bounds(self) -> SlotBounds:
        assert self.bounds is not None, "the prompt comes first"
        return self.bounds
