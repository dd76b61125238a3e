"""KV cache with tree verification: nodes are written after the committed tokens, accepted nodes are compacted.

Each row holds one sequence, with its committed tokens in the first slots. A forward pass writes its nodes after the
longest row; shorter rows mask the slots in between.

Keys and values of the same shape share a buffer (tensors, rows, kv_heads, slots, head_dim). If all layers are alike, a
commit is one gather and one scatter for the whole model. Latent attention (MLA) has a buffer for each of its two
tensors, an indexer has a buffer for its keys, and layers that reuse another layer's keys and values have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from mmspec.cache.rows import batch_bucket, row_index
from mmspec.core.target import KeysValues
from mmspec.errors import UserError
from mmspec.ops import compact_kv, cpu
from mmspec.ops.transfer import on_device

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument: since transformers 5.24, earlier, and earlier in models without attention."""


def cache_argument(module: nn.Module) -> str:
    """Name of the cache argument of a module's forward; empty if it has none."""
    kind: Any = type(module)
    return _cache_argument(kind)


@cache
def _cache_argument(kind: Any) -> str:
    parameters = signature(kind.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "")


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, by any of its names; None if absent."""
    return next((x for name in CACHE_NAMES if (x := arguments.get(name)) is not None), None)


_LARGE_BYTES = 1 << 26  # above this total size, buffers grow by an eighth instead of doubling
_LEAST_BYTES = 2 * cpu.PAGE  # minimum size of a buffer with huge pages


class KVBuffers:
    """Key and value storage of a ``TreeCache``, which stores the row lengths.

    Args:
        reserve: slots to allocate at first use.
        centre: as for ``TreeCache``.

    Attributes:
        version: replaced whenever a buffer is reallocated.
        device: device of the row lengths if no layer has keys and values.
    """

    def __init__(self, layers: int, reserve: int, centre: Tensor | None = None) -> None:
        self.device, self.centre = torch.device("cpu"), centre
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
        memory = cpu.zeros(size, huge=True) if like.device.type == "cpu" and size >= _LEAST_BYTES else None
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
        if self.centre is not None:  # a code per feature, and a float
            states = [x.new_empty(*x.shape[:-1], x.shape[-1] + 4, dtype=torch.uint8) for x in states]
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
        """Write a layer's states of a pass to its slots; arguments as for ``layer``. Returns each state in all slots up
        to the last written slot."""
        end, buffers = start + states[0].shape[2], self.layer(layer, states, start)
        written = states
        if self.centre is not None:
            written = [cpu.int8_heads(states[0], self._centre(layer)), cpu.int8_heads(states[1])]
        for buffer, new in zip(buffers, written, strict=True):
            buffer[:, :, start:end] = new
        return self.floats(layer, [buffer[:, :, :end] for buffer in buffers], states[0].dtype)

    def floats(self, layer: int, stored: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Keys and values of a layer from slots of its buffers: those in int8 in a dtype, others unchanged."""
        if self.centre is None:
            return stored
        return [cpu.float_heads(stored[0], self._centre(layer)).to(dtype), cpu.float_heads(stored[1]).to(dtype)]

    def _centre(self, layer: int) -> Tensor:
        assert self.centre is not None
        return self.centre[self._places[layer, 2][0][1] // 2]  # a layer's keys are before its values

    def shared(self, layers: Sequence[int], rows: int, nodes: int, like: Tensor, start: int) -> Tensor:
        """The shared buffer of identical layers, with slots for the next pass, for kernels that write to it; ``like``,
        (kv_heads, any, head_dim), has their shape, dtype and device."""
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
        """Remove padding, and free tensors left unused because shapes differ or layers share keys and values. ``kept``
        are the slots to keep per row; None without padding."""
        self.tensors = [
            buffer if used == len(buffer) else buffer[:used].clone()
            for buffer, used in zip(self.tensors, self._used, strict=True)
        ]
        for buffer in self.tensors if kept is not None else ():
            for row, slots in enumerate(kept or ()):
                buffer[:, row, :, : len(slots)] = buffer[:, row, :, slots]

    def append(self, new: KVBuffers, chosen: Sequence[int], lengths: Sequence[int], slots: int, longest: int) -> None:
        """Append the ``chosen`` rows of other buffers, of at most ``longest`` tokens, to rows of these ``lengths``; the
        longest row may need ``slots`` slots."""
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
        self.tensors, self._used, self._places = [], [], {}

    @property
    def layout(self) -> list[Any]:
        """Places of the layers' states in the buffers, for JSON."""
        return [self._used, [[*place, found] for place, found in self._places.items()]]

    def load(self, layout: list[Any], tensors: Sequence[Tensor]) -> None:
        """Use these buffers, copies from buffers with this ``layout``."""
        self.tensors, self.version, self._used = list(tensors), object(), layout[0]
        self._places = {(layer, count): [(*at,) for at in found] for layer, count, found in layout[1]}

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

    def __init__(self, layers: int, reserve: int, centre: Tensor | None = None) -> None:
        super().__init__(layers, reserve, centre)
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


class TreeCache(Cache):
    """KV cache of a batch of sequences under tree verification.

    Prefill runs in a separate cache, whose rows are then appended to the decoding cache.

    Args:
        reserve: slots to allocate at first use.
        attending: indices of attention layers; None means all.
        static_shapes: keep shapes and addresses, see ``StaticKVBuffers``.
        centre: (attention layers, kv_heads, head_dim) float32: keys and values are stored in int8, keys without this
            constant, see ``cpu.int8_heads``. None stores their dtype.

    Attributes:
        attending: indices of attention layers, in order.
        lengths: committed tokens of each row.
        length: the longest row's length; passes write from this slot on.
        offset: uncommitted nodes of earlier passes that stay in the cache after ``length``.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        reserve: int = 512,
        attending: Sequence[int] | None = None,
        static_shapes: bool = False,
        centre: Tensor | None = None,
    ) -> None:
        self.attending = list(range(num_layers) if attending is None else attending)
        self.static_shapes = static_shapes
        self.kv = (StaticKVBuffers if static_shapes else KVBuffers)(len(self.attending), reserve, centre)
        self.offset = 0
        self._lengths: list[int] = []
        self._length = 0
        self._accepted: Callable[[], Sequence[int]] | None = None  # accepted nodes of the last commit, read lazily
        self._prompt_tokens: set[int] = set()  # numbers of tokens cached by layers in the prefill
        self._attended: Tensor | None = None
        super().__init__(layers=[_Layer(self, layer) for layer in range(num_layers)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for layer in self.layers:
            layer.belongs_to(self)  # type: ignore[union-attr]

    @property
    def lengths(self) -> list[int]:
        if (accepted := self._accepted) is not None:
            self._accepted = None
            self._set([length + count for length, count in zip(self._lengths, accepted(), strict=True)])
        return self._lengths

    @property
    def length(self) -> int:
        return self._length if self._accepted is None else max(self.lengths)

    def _set(self, lengths: list[int]) -> None:
        self._lengths, self._length, self._attended = lengths, max(lengths, default=0), None

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self._lengths)

    @property
    def version(self) -> object:
        """Changes whenever a buffer is reallocated."""
        return self.kv.version

    @property
    def bounds(self) -> SlotBounds | None:
        """Row lengths on the device, including idle rows; None without static shapes or without rows."""
        return self.kv.bounds if isinstance(self.kv, StaticKVBuffers) else None

    @property
    def padded(self) -> bool:
        """Whether row lengths differ, so that passes need a mask over the prefix."""
        return bool(self.lengths) and min(self.lengths) != self.length

    @property
    def attended(self) -> Tensor:
        """(rows, length) bool, committed slots of each row."""
        if self._attended is None:
            device = self.kv.tensors[0].device
            lengths = torch.tensor(self.lengths, dtype=torch.long, device=device)
            self._attended = torch.arange(self.length, device=device) < lengths[:, None]
        return self._attended

    def keys_values(self, layer: int, rows: int) -> KeysValues:
        """Keys and values of a layer, see ``SharesKeysValues``; with static shapes, of all slots."""
        keys, values = (states[:rows] for states in self.kv.states(layer))
        if self.bounds is not None:
            return KeysValues(keys, values, self.bounds.lengths[:rows], self.version)
        keys, values = self.kv.floats(layer, [keys[:, :, : self.length], values[:, :, : self.length]])
        return KeysValues(keys, values, on_device(self.lengths[:rows], keys.device), self.version)

    def reserve_nodes(self, nodes: int) -> None:
        """Reserve KV slots for the next pass; a captured pass cannot allocate."""
        start = self.get_seq_length()
        self.kv.allocate(self.rows, start + nodes, start)

    def set_write_slots(self, nodes: int) -> None:
        """Set the write slots of the next pass, with static shapes. Captured."""
        assert isinstance(self.kv, StaticKVBuffers)
        self.kv.set_write_slots(nodes, self.offset)

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        """Extra keyword arguments of the decoder's forward in a verify pass, for layers other than attention; ``reach``
        is (batch, nodes, earlier + nodes) bool, ancestors of each node among the uncommitted nodes."""
        return {}

    def recurrent(self, weights: Any, prompt: int = 0) -> tuple[Tensor | None, Any] | tuple[()]:
        """Ancestors and ``cpu.recurrent_buffers`` of the current pass; empty without recurrent layers. The next commit
        uses them, and ``weights``, results of ``cpu.sublayers``.

        Args:
            prompt: rows of a prompt, whose pass advances the states; 0 for a tree.
        """
        return ()

    def commit_prompt(self, tokens: int, attention_mask: Tensor | None, batch: int) -> None:
        """Commit the ``tokens`` slots that a prefill of ``batch`` rows wrote, and remove padding.

        Args:
            attention_mask: (batch, tokens), 0 at padding; None when there is none.

        Raises:
            UserError: a layer did not cache one entry per token, e.g. cross-attention to an image.
        """
        if other := self._prompt_tokens - {tokens}:
            raise UserError(f"layers must cache the prompt's tokens: expected {tokens} entries, received {min(other)}")
        kept = None if attention_mask is None else [row.nonzero()[:, 0] for row in attention_mask[:, :tokens]]
        self.kv.commit_prompt(kept)
        self._changed([tokens] * batch if kept is None else [len(slots) for slots in kept])

    def append(self, prompt: TreeCache, reserve: int = 0, chosen: Sequence[int] | None = None) -> None:
        """Append all rows of another cache, e.g. after a prefill, or its ``chosen`` rows. The longest row may need
        ``reserve`` slots in total."""
        rows = range(prompt.rows) if chosen is None else chosen
        lengths = [prompt.lengths[row] for row in rows]
        longest = max(lengths, default=0)
        self.kv.append(prompt.kv, rows, self.lengths, max(self.length, longest, reserve - 1), longest)
        self._changed(self.lengths + lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; free the others' slots."""
        self.kv.select(rows, self.lengths)
        self.offset = 0
        self._changed([self.lengths[row] for row in rows])

    def truncate(self, length: int, recurrent: Sequence[Tensor] = ()) -> None:
        """Drop the tokens of a single row from ``length`` on; ``recurrent`` are its ``row_states`` at this length."""
        self._changed([length])

    def row_states(self, row: int) -> tuple[Tensor, ...]:
        """Copies of a row's recurrent states, (1, ...) each."""
        return ()

    @property
    def layout(self) -> list[Any]:
        """Arguments of ``load`` other than tensors, for JSON."""
        return self.kv.layout

    def parts(self, part: slice) -> list[Tensor]:
        """Keys and values of some tokens of a single row, (tensors, 1, kv_heads, tokens, head_dim) each."""
        return [buffer[:, :1, :, part] for buffer in self.kv.tensors]

    def load(self, layout: list[Any], parts: Sequence[Tensor], recurrent: Sequence[Tensor], length: int) -> None:
        """Fill an empty cache with a row of ``length`` tokens."""
        self.kv.load(layout, parts)
        self._changed([length])

    def _changed(self, lengths: list[int]) -> None:
        """Set lengths after rows were added or removed."""
        self._accepted = None
        self._set(lengths)
        self.kv.set_lengths(lengths)

    def commit(self, path: Tensor, rows: list[list[int]]) -> None:
        """Commit the accepted path of each row and drop all other nodes.

        Args:
            path: (rows, depth) int64, node indices padded with -1; node i is in slot ``length + i``. With static
                shapes, it may include idle rows.
            rows: the paths as Python lists without padding; an empty path leaves its row unchanged.
        """
        self.kv.commit(path, rows, self.lengths)
        self.advance(lambda: list(map(len, rows)))

    def commit_on_device(self, path: Tensor) -> None:
        """Device part of a ``commit`` with static shapes; ``advance`` is the host part."""
        assert isinstance(self.kv, StaticKVBuffers)
        self.kv.commit_on_device(path)

    def advance_on_device(self, length: Tensor) -> None:
        """``commit_on_device`` for the first ``length`` nodes, (1,) int64, of a single row."""
        assert isinstance(self.kv, StaticKVBuffers)
        self.kv.advance_on_device(length)

    def advance(self, accepted: Callable[[], Sequence[int]]) -> None:
        """Advance row lengths by the number of accepted nodes, read from the device once a length is needed."""
        if self._accepted is not None:
            _ = self.lengths  # applies the previous commit
        self._accepted, self.offset = accepted, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length + self.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class _Layer(CacheLayerMixin):
    """One layer's view of the shared buffer, as a cache layer of transformers."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self.index = index
        self.belongs_to(cache)

    def belongs_to(self, cache: TreeCache) -> None:
        self._cache = ref(cache)  # a reference cycle would keep the buffers until garbage collection

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cache"}

    @property
    def cache(self) -> TreeCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache.kv.layer(self.index, (key_states, value_states), self.get_seq_length())
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.cache.lengths:
            self.cache._prompt_tokens.add(key_states.shape[2])
        keys, values = self.cache.kv.write(self.index, (key_states, value_states), self.get_seq_length())
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write keys of a sparse-attention indexer, (rows, nodes, head_dim); returns the keys of all slots."""
        start = self.get_seq_length()
        return self.cache.kv.write(self.index, (indexer_key_states[:, None],), start)[0][:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length + self.cache.offset

    def get_max_length(self) -> int:
        return -1
