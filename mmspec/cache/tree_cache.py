"""Preallocated KV cache with tree verification: nodes are written after the committed tokens, accepted ones compacted.

Keys and values of one shape share a buffer (tensors, rows, kv_heads, slots, head_dim). Where all layers are alike, a
commit is thus one gather and one scatter for the whole model; latent attention (MLA) has a buffer for each of its two
tensors, layers with an indexer have one more for its keys, and layers that reuse another layer's keys and values have
none. Each row holds one sequence, its committed tokens in the first slots. Rows differ in length: a forward pass writes
its nodes after the longest row, and shorter rows mask the slots in between.

In place (static shapes), row lengths are device tensors, writes are indexed and whole buffers are returned: every pass
of a shape runs the same kernels on the same addresses and can be captured as a CUDA graph.
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


class TreeCache(Cache):
    """KV cache of a batch of sequences under tree verification.

    Prefill runs in a cache of its own, whose rows are then appended to the decoding cache.

    Args:
        num_layers: layers of the model.
        reserve: slots to allocate at first use; doubled when exceeded.
        attending: indices of attention layers; None means all.
        in_place: static shapes and addresses, see above.

    Attributes:
        attending: as above, in order.
        rows: number of sequences.
        lengths: committed tokens of each row.
        length: the longest row's length; passes write from this slot on.
        offset: uncommitted nodes of earlier passes that stay in the cache after ``length``.
        bounds: row lengths on the device, idle rows included; None unless in place and non-empty.
        version: replaced whenever a buffer is reallocated.
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
        self.bounds: SlotBounds | None = None
        self.version = object()
        self._write_slots: Tensor | None = None  # (nodes,) of the current pass, if in place
        self._buffers: list[Tensor] = []
        self._used: list[int] = []  # tensors of each buffer
        self._prompt_tokens: set[int] = set()  # that layers cached in the first pass
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}  # buffer and tensor of each of a layer's states
        self._attended: Tensor | None = None
        super().__init__(layers=[_Layer(self, layer) for layer in range(num_layers)])

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Number of allocated slots."""
        return self._buffers[0].shape[3] if self._buffers else 0

    @property
    def padded(self) -> bool:
        """Whether row lengths differ, so that passes need a mask over the prefix."""
        return bool(self.lengths) and min(self.lengths) != self.length

    @property
    def attended(self) -> Tensor:
        """(rows, length) bool, committed slots of each row."""
        assert self._buffers, "the prompt comes first"
        if self._attended is None:
            device = self._buffers[0].device
            self._attended = (
                torch.arange(self.length, device=device) < torch.tensor(self.lengths, device=device)[:, None]
            )
        return self._attended

    def allocate(self, rows: int, slots: int) -> None:
        """Grow the buffers to at least ``rows`` rows and ``slots`` slots."""
        if not self._buffers:
            return
        # One extra slot serves as a write sink for the padding of ragged commits.
        allocated, capacity = self._buffers[0].shape[1], self.capacity
        if slots < capacity and rows <= allocated:
            return
        slots = capacity if slots < capacity else max(slots + 1, 2 * capacity)
        rows = allocated if rows <= allocated else max(rows, 2 * allocated)
        used = self.length + self.offset
        for place, old in enumerate(self._buffers):
            grown = self._buffers[place] = self._zeros(len(old), rows, slots, old)
            grown[:, :allocated, :, :used] = old[:, :, :, :used]

    def _zeros(self, tensors: int, rows: int, slots: int, like: Tensor) -> Tensor:
        """A new buffer, like a tensor (..., kv_heads, any, head_dim)."""
        if self.in_place:
            slots, rows = slots + -slots % _SLOT_MULTIPLE, batch_bucket(rows)
        self.version = object()
        return like.new_zeros(tensors, rows, like.shape[-3], slots, like.shape[-1])

    def written(self, layer: int, states: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the buffers for a layer's states, (rows, kv_heads, slots, head_dim) each, with slots for the
        next pass.

        Args:
            states: of the pass, (rows, kv_heads, nodes, head_dim): keys and values, or an indexer's keys alone.
        """
        rows, _, count, _ = states[0].shape
        self.allocate(rows, self.get_seq_length() + count)
        place = layer, len(states)
        if place not in self._places:
            alike = len(self.attending) * sum(_kind(one) == _kind(states[0]) for one in states)
            self._places[place] = [self._next_tensor(one, alike) for one in states]
        return [self._buffers[buffer][tensor, :rows] for buffer, tensor in self._places[place]]

    def write(self, layer: int, states: Sequence[Tensor]) -> list[Tensor]:
        """Write a layer's states of a pass to their slots; arguments as for ``written``.

        Returns:
            The states of all slots up to the last one written, in place of the whole buffer, each.
        """
        start, count = self.get_seq_length(), states[0].shape[2]
        buffers = self.written(layer, states)
        for buffer, new in zip(buffers, states, strict=True):
            if self._write_slots is not None:
                buffer.index_copy_(2, self._write_slots, new)
            else:
                buffer[:, :, start : start + count] = new
        return buffers if self._write_slots is not None else [buffer[:, :, : start + count] for buffer in buffers]

    def _next_tensor(self, states: Tensor, alike: int) -> tuple[int, int]:
        """The next free tensor for keys or values of a shape, expected to be ``alike`` in all."""
        kinds = [_kind(buffer) for buffer in self._buffers]
        if _kind(states) not in kinds:
            kinds.append(_kind(states))
            rows, _, count, _ = states.shape
            if self._buffers:
                rows, slots = self._buffers[0].shape[1], self.capacity
            else:
                slots = max(self.get_seq_length() + count + 1, self.reserve)
            self._buffers.append(self._zeros(alike, rows, slots, states))
            self._used.append(0)
        buffer = kinds.index(_kind(states))
        if self._used[buffer] == len(self._buffers[buffer]):
            self._buffers[buffer] = torch.cat([self._buffers[buffer], torch.zeros_like(self._buffers[buffer])])
        self._used[buffer] += 1
        return buffer, self._used[buffer] - 1

    def tensors(self) -> list[Tensor]:
        """The buffers, for their memory."""
        return self._buffers

    def truncate(self, length: int) -> None:
        """Drop the tokens of a single row from ``length`` on."""
        self.lengths = [length]
        self._changed()

    def reserve_nodes(self, nodes: int) -> None:
        """Reserve KV slots for the next pass; a captured pass cannot allocate."""
        self.allocate(self.rows, self.get_seq_length() + nodes)

    def written_by_kernels(self, rows: int, nodes: int, like: Tensor) -> tuple[Tensor, int]:
        """The buffer of layers that are all alike, and the first slot of the next pass, for kernels that write keys and
        values themselves.

        Args:
            like: (kv_heads, any, head_dim), for shape, dtype and device.
        """
        states = like.expand(rows, *like.shape)
        for layer in self.attending if not self._places else ():
            self.written(layer, (states, states))
        start = self.get_seq_length()
        self.allocate(rows, start + nodes)
        return self._buffers[0], start

    def set_write_slots(self, nodes: int) -> None:
        """Set the write slots of the next pass; part of what is captured."""
        assert self.bounds is not None, "the prompt comes first"
        start = self.bounds.start
        self._write_slots = start + torch.arange(self.offset, self.offset + nodes, device=start.device)

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        """Extra keyword arguments of the decoder's forward in a verify pass, for layers other than attention.

        Args:
            reach: (batch, nodes, earlier + nodes) bool, ancestors of each node among the uncommitted nodes.
        """
        return {}

    # ------------------------------------------------------------------ sequences join and leave

    def commit_prompt(self, tokens: int, attention_mask: Tensor | None, batch: int) -> None:
        """Commit the ``tokens`` slots that a prefill of ``batch`` rows wrote, and remove padding.

        Args:
            attention_mask: (batch, tokens), 0 at padding; None when there is none.

        Raises:
            UserError: a layer has cached other than one entry per token, such as an image's for cross-attention.
        """
        if other := self._prompt_tokens - {tokens}:
            raise UserError(f"layers must cache the prompt's tokens: expected {tokens} entries, received {min(other)}")
        # Tensors that no layer needed, where shapes differ or layers share keys and values.
        self._buffers = [
            buffer if used == len(buffer) else buffer[:used].clone()
            for buffer, used in zip(self._buffers, self._used, strict=True)
        ]
        if attention_mask is None:
            self.lengths = [tokens] * batch
        else:
            kept = [row.nonzero()[:, 0] for row in attention_mask[:, :tokens]]
            self.lengths = [len(slots) for slots in kept]
            for buffer in self._buffers:
                for row, slots in enumerate(kept):
                    buffer[:, row, :, : len(slots)] = buffer[:, row, :, slots]
        self._changed()

    def append(self, prompt: TreeCache, reserve: int = 0, chosen: Sequence[int] | None = None) -> None:
        """Append rows of another cache, of a prefill for example.

        Args:
            reserve: total slots that the longest of these rows may need.
            chosen: the rows; None appends all.
        """
        lengths = prompt.lengths if chosen is None else [prompt.lengths[row] for row in chosen]
        rows, longest = self.rows + len(lengths), max(lengths, default=0)
        if prompt._buffers:
            kinds = [_kind(buffer) for buffer in prompt._buffers]
            if self._buffers and [_kind(buffer) for buffer in self._buffers] != kinds:
                self._buffers, self.bounds = [], None  # the model moved to another device or dtype
            slots = max(self.length, longest, reserve - 1)
            if not self._buffers:
                size = max(slots + 1, self.reserve)
                self._buffers = [self._zeros(len(buffer), rows, size, buffer) for buffer in prompt._buffers]
                self._used, self._places = prompt._used[:], dict(prompt._places)
            self.allocate(rows, slots)
            for ours, theirs in zip(self._buffers, prompt._buffers, strict=True):
                taken = theirs[:, : prompt.rows] if chosen is None else theirs[:, row_index(chosen, theirs.device)]
                ours[:, self.rows : rows, :, :longest] = taken[:, :, :, :longest]
        self.lengths = self.lengths + lengths
        self._changed()

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; free the others' slots."""
        if not rows and not self.in_place:
            self._buffers, self._used, self._places = [], [], {}
        moved = any(new > old for new, old in enumerate(rows))
        for buffer in self._buffers:
            if moved:
                index = row_index(rows, buffer.device)
                buffer[:, : len(rows), :, : self.length] = buffer[:, index, :, : self.length]
                continue
            for new, old in enumerate(rows):  # rows only move to lower indices, whose content is no longer needed
                if new != old:
                    buffer[:, new, :, : self.lengths[old]] = buffer[:, old, :, : self.lengths[old]]
        self.lengths = [self.lengths[row] for row in rows]
        self.offset = 0
        self._changed()

    def _changed(self) -> None:
        """Update lengths after rows were added or removed."""
        self.length, self._attended, self._write_slots = max(self.lengths, default=0), None, None
        if not self.in_place or (not self._buffers and self.attending):
            return
        size = self._buffers[0].shape[1] if self._buffers else batch_bucket(self.rows)
        if self.bounds is None or len(self.bounds.lengths) < size:
            zeros = torch.zeros(size + 1, dtype=torch.long, device=self._device())
            self.bounds, self.version = SlotBounds(zeros[:-1], zeros[-1:]), object()
        assert self.bounds is not None
        idle = [0] * (len(self.bounds.lengths) - self.rows)
        self.bounds.lengths.copy_(on_device(self.lengths + idle, self.bounds.lengths.device))
        self.bounds.start.fill_(self.length)

    def _device(self) -> torch.device:
        return self._buffers[0].device

    # ------------------------------------------------------------------ the accepted path

    def commit(self, path: Tensor, rows: list[list[int]]) -> None:
        """Commit the accepted path of each row and drop all other nodes.

        Args:
            path: (rows, depth) int64, node indices padded with -1; node i is in slot ``length + i``. In place, it may
                include idle rows.
            rows: the same paths as Python lists without padding; an empty path leaves its row unchanged.
        """
        if self.in_place:
            self.commit_on_device(path)
        elif self.attending:
            self._compact(path, rows)
        self.advance(list(map(len, rows)))

    def commit_on_device(self, path: Tensor) -> None:
        """Device part of an in-place ``commit``; ``advance`` is the host part."""
        assert self.bounds is not None, "the prompt comes first"
        bounds = self.bounds.first(len(path))
        for buffer in self._buffers:
            compact_kv(buffer[:, : len(path)], path, bounds.start, bounds.lengths)
        bounds.lengths.add_((path >= 0).sum(1))
        bounds.start.copy_(bounds.lengths.amax(0, keepdim=True))

    def advance(self, accepted: Sequence[int]) -> None:
        """Advance row lengths by the number of accepted nodes."""
        self.lengths = [length + count for length, count in zip(self.lengths, accepted, strict=True)]
        self.length, self._attended = max(self.lengths), None
        self.offset = 0

    def _compact(self, path: Tensor, rows: list[list[int]]) -> None:
        start, longest = self.length, max(map(len, rows))
        if all(n == start for n in self.lengths) and all(r == list(range(len(r))) for r in rows):
            return  # already in place
        path = path[:, :longest]
        if len(rows) == 1:
            slot = self.lengths[0]
            for buffer in self._buffers:
                buffer[:, :1, :, slot : slot + longest] = buffer[:, :1, :, start + path[0]]
            return
        steps = torch.arange(longest, device=path.device)
        lengths = torch.tensor(self.lengths, device=path.device)[:, None]
        target = torch.where(path >= 0, lengths + steps, self.capacity - 1)
        row = torch.arange(len(rows), device=path.device)[:, None]
        for buffer in self._buffers:
            buffer[:, row, :, target] = buffer[:, row, :, start + path.clamp(min=0)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length + self.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class _Layer(CacheLayerMixin):
    """One layer's view of the shared buffer, as a cache layer of transformers."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache.written(self.index, (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.cache.lengths:
            self.cache._prompt_tokens.add(key_states.shape[2])
        keys, values = self.cache.write(self.index, (key_states, value_states))
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys of sparse attention's indexer, (rows, nodes, head_dim); returns those of all slots."""
        return self.cache.write(self.index, (indexer_key_states[:, None],))[0][:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length + self.cache.offset

    def get_max_length(self) -> int:
        return -1


def _kind(states: Tensor) -> tuple[Any, ...]:
    """What tensors of one buffer have in common."""
    return states.shape[-3], states.shape[-1], states.dtype, states.device
