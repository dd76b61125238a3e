"""Preallocated KV cache with tree verification: nodes are written after the committed tokens, accepted ones compacted.

All layers share one buffer (layers * 2, rows, kv_heads, slots, head_dim), so that a commit is one gather and one
scatter for the whole model. A row is one sequence's; its committed tokens are its first slots. Rows have their own
lengths: a forward pass writes its nodes from the longest row's end on, and shorter rows mask the slots in between.

In place (static shapes), row lengths are device tensors, a pass writes by index and returns whole buffers, so that
every pass of a shape runs the same kernels at the same addresses and can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mmspec.cache.rows import batch_bucket, row_index
from mmspec.errors import UserError
from mmspec.ops import compact_kv
from mmspec.ops.transfer import on_device

_ROUND = 256  # slots; buffers of requests of about one length are of one size


@dataclass(frozen=True)
class Ends:
    """Row lengths on the device. The tensors keep their addresses and change in place.

    Attributes:
        begin, end: (rows,) int64, a row's committed slots are ``begin <= slot < end``; 0 and 0 for an idle row.
        start: (1,) int64, the slot of a pass's first node: the greatest ``end``.
    """

    begin: Tensor
    end: Tensor
    start: Tensor

    def first(self, rows: int) -> Ends:
        """Of the first ``rows`` rows: views."""
        return Ends(self.begin[:rows], self.end[:rows], self.start)


class TreeCache(Cache):
    """KV cache of a batch of sequences under tree verification.

    A prompt is absorbed by a cache of its own, whose rows are then appended to the cache that decodes.

    Args:
        num_layers: layers of the model.
        reserve: slots to allocate at first use; more are added by doubling when needed.
        attending: the layers that have keys and values; None means all.
        in_place: static shapes and addresses, see above.

    Attributes:
        attending: as above, in order.
        rows: sequences.
        lengths: committed tokens of each row.
        length: the longest row's; forwards write from here on.
        offset: uncommitted nodes of earlier passes that stay in the cache after ``length``.
        ends: row lengths on the device, if in place and once there is a row; it may have idle rows at its end.
        version: a new object whenever a buffer has moved.
    """

    def __init__(
        self, num_layers: int, *, reserve: int = 512, attending: Sequence[int] | None = None, in_place: bool = False
    ) -> None:
        self.attending = list(range(num_layers) if attending is None else attending)
        self.length = 0
        self.offset = 0
        self.lengths: list[int] = []
        self.reserve = reserve
        self.in_place = in_place
        self.ends: Ends | None = None
        self.version = object()
        self._at: Tensor | None = None  # (nodes,) write slots of the current pass, if in place
        self._storage: Tensor | None = None
        self._attended: Tensor | None = None
        place = {layer: place for place, layer in enumerate(self.attending)}
        super().__init__(layers=[_Layer(self, layer, place.get(layer, -1)) for layer in range(num_layers)])

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Slots of the buffer."""
        return self._storage.shape[3] if self._storage is not None else 0

    @property
    def padded(self) -> bool:
        """Whether rows differ in length, so that passes need a mask over the prefix."""
        return bool(self.lengths) and min(self.lengths) != self.length

    @property
    def attended(self) -> Tensor:
        """(rows, length) bool, committed slots of each row."""
        assert self._storage is not None, "the prompt comes first"
        if self._attended is None:
            device = self._storage.device
            self._attended = (
                torch.arange(self.length, device=device) < torch.tensor(self.lengths, device=device)[:, None]
            )
        return self._attended

    def allocate(self, rows: int, slots: int, like: Tensor) -> Tensor:
        """The shared buffer, with at least ``rows`` rows and ``slots`` slots. ``like``: (..., kv_heads, any,
        head_dim)."""
        old = self._storage
        # The last slot is never read: padding entries of a ragged commit are written there.
        if old is None or slots >= self.capacity or rows > old.shape[1]:
            if old is None:
                slots = max(slots + 1, self.reserve)
            else:
                slots = self.capacity if slots < self.capacity else max(slots + 1, 2 * self.capacity)
                rows = old.shape[1] if rows <= old.shape[1] else max(rows, 2 * old.shape[1])
            if self.in_place:
                slots, rows = slots + -slots % _ROUND, batch_bucket(rows)
            self.version = object()
            grown = like.new_zeros(2 * len(self.attending), rows, like.shape[-3], slots, like.shape[-1])
            if old is not None:
                used = self.length + self.offset
                grown[:, : old.shape[1], :, :used] = old[:, :, :, :used]
            self._storage = grown
        assert self._storage is not None
        return self._storage

    def reserve_nodes(self, nodes: int) -> None:
        """Grow, if need be, before a pass over so many nodes: a captured pass cannot."""
        if self._storage is not None:
            self.allocate(self.rows, self.length + self.offset + nodes, self._storage)

    def set_write_slots(self, nodes: int) -> None:
        """Set the write slots of the next pass, in place; to be called where that is captured."""
        assert self.ends is not None, "the prompt comes first"
        self._at = self.ends.start + torch.arange(self.offset, self.offset + nodes, device=self.ends.start.device)

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        """Further keyword arguments of the decoder's forward for a pass over nodes, for layers other than attention.

        Args:
            reach: (batch, nodes, earlier + nodes) bool, which uncommitted nodes each new node follows.
        """
        return {}

    # ------------------------------------------------------------------ sequences join and leave

    def commit_prompt(self, tokens: int, attention_mask: Tensor | None, batch: int) -> None:
        """Keep the ``tokens`` slots that a prefill of ``batch`` rows wrote, without the padding.

        Args:
            attention_mask: (batch, tokens), 0 at padding; None when there is none.
        """
        if attention_mask is None:
            self.lengths = [tokens] * batch
        else:
            kept = [row.nonzero()[:, 0] for row in attention_mask[:, :tokens]]
            self.lengths = [len(slots) for slots in kept]
            if self._storage is not None:
                for row, slots in enumerate(kept):
                    self._storage[:, row, :, : len(slots)] = self._storage[:, row, :, slots]
        self._changed()

    def append(self, prompt: TreeCache, reserve: int = 0) -> None:
        """Add the rows of a cache that has absorbed prompts.

        Args:
            reserve: slots that the longest of them may need in all.
        """
        rows = self.rows + prompt.rows
        if (new := prompt._storage) is not None:
            if self._storage is not None and (self._storage.device, self._storage.dtype) != (new.device, new.dtype):
                self._storage = self.ends = None  # the model was moved
            storage = self.allocate(rows, max(self.length, prompt.length, reserve - 1), new)
            storage[:, self.rows : rows, :, : prompt.length] = new[:, : prompt.rows, :, : prompt.length]
        self.lengths = self.lengths + prompt.lengths
        self._changed()

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; the others' slots are free."""
        if not rows and not self.in_place:
            self._storage = None
        storage = self._storage
        if storage is not None and any(new > old for new, old in enumerate(rows)):
            index = row_index(rows, storage.device)
            storage[:, : len(rows), :, : self.length] = storage[:, index, :, : self.length]
        elif storage is not None:  # every row moves up, if at all, into one that is not needed any more
            for new, old in enumerate(rows):
                if new != old:
                    storage[:, new, :, : self.lengths[old]] = storage[:, old, :, : self.lengths[old]]
        self.lengths = [self.lengths[row] for row in rows]
        self.offset = 0
        self._changed()

    def _changed(self) -> None:
        """Rows have joined or left."""
        self.length, self._attended, self._at = max(self.lengths, default=0), None, None
        if not self.in_place or (self._storage is None and self.attending):
            return
        size = batch_bucket(self.rows) if self._storage is None else self._storage.shape[1]
        if self.ends is None or len(self.ends.end) < size:
            device = self._device()
            zeros = torch.zeros(2 * size + 1, dtype=torch.long, device=device)
            self.ends, self.version = Ends(zeros[:size], zeros[size:-1], zeros[-1:]), object()
        assert self.ends is not None
        idle = [0] * (len(self.ends.end) - self.rows)
        self.ends.end.copy_(on_device(self.lengths + idle, self.ends.end.device))
        self.ends.start.fill_(self.length)

    def _device(self) -> torch.device:
        assert self._storage is not None
        return self._storage.device

    # ------------------------------------------------------------------ the accepted path

    def commit(self, path: Tensor, rows: list[list[int]]) -> None:
        """Keep the accepted path of each row; all other nodes after ``length`` are dropped.

        Args:
            path: (rows, depth) int64, node indices padded with -1; node i is in slot ``length + i``. In place, it may
                have idle rows at its end.
            rows: the same paths as Python lists without padding; an empty one leaves its row as it is.
        """
        if self.in_place:
            self.keep(path)
        elif self.attending:
            self._compact(path, rows)
        self.advance(list(map(len, rows)))

    def keep(self, path: Tensor) -> None:
        """The device's part of a commit in place; ``advance`` is the host's."""
        assert self.ends is not None, "the prompt comes first"
        ends = self.ends.first(len(path))
        if self._storage is not None:
            compact_kv(self._storage[:, : len(path)], path, ends.start, ends.end)
        ends.end.add_((path >= 0).sum(1))
        ends.start.copy_(ends.end.amax(0, keepdim=True))

    def advance(self, kept: Sequence[int]) -> None:
        """Advance the lengths: so many nodes of each row were kept."""
        self.lengths = [length + more for length, more in zip(self.lengths, kept, strict=True)]
        self.length, self._attended = max(self.lengths), None
        self.offset = 0

    def _compact(self, path: Tensor, rows: list[list[int]]) -> None:
        storage, start, longest = self._storage, self.length, max(map(len, rows))
        assert storage is not None
        if all(n == start for n in self.lengths) and all(r == list(range(len(r))) for r in rows):
            return  # they are where they belong
        path = path[:, :longest]
        if len(rows) == 1:
            slot = self.lengths[0]
            storage[:, :1, :, slot : slot + longest] = storage[:, :1, :, start + path[0]]
            return
        steps = torch.arange(longest, device=path.device)
        begin = torch.tensor(self.lengths, device=path.device)[:, None]
        target = torch.where(path >= 0, begin + steps, self.capacity - 1)
        row = torch.arange(len(rows), device=path.device)[:, None]
        storage[:, row, :, target] = storage[:, row, :, start + path.clamp(min=0)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length + self.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class _Layer(CacheLayerMixin):
    """One layer's view of the shared buffer, with the interface that transformers' models expect."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int, place: int) -> None:
        super().__init__()
        self.cache, self.index, self.place = cache, index, place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache.allocate(len(key_states), 0, key_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, _, count, _ = key_states.shape
        begin = self.cache.length + self.cache.offset
        storage = self.cache.allocate(rows, begin + count, key_states)
        expected = (rows, storage.shape[2], count, storage.shape[4])
        if key_states.shape != expected or value_states.shape != expected:
            raise UserError(
                f"all layers must have keys and values of one shape: expected {expected}, "
                f"layer {self.index} has {tuple(key_states.shape)} and {tuple(value_states.shape)}"
            )
        keys, values = storage[2 * self.place, :rows], storage[2 * self.place + 1, :rows]
        if self.cache._at is not None:
            keys.index_copy_(2, self.cache._at, key_states)
            values.index_copy_(2, self.cache._at, value_states)
            return keys, values
        keys[:, :, begin : begin + count] = key_states
        values[:, :, begin : begin + count] = value_states
        return keys[:, :, : begin + count], values[:, :, : begin + count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length + self.cache.offset

    def get_max_length(self) -> int:
        return -1
