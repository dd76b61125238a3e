"""KV cache with tree verification: nodes are written after the committed tokens, accepted nodes are compacted.

Each row holds one sequence, with its committed tokens in the first slots. A forward pass writes its nodes after the
longest row; shorter rows mask the slots in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from mmspec.cache.buffers import KVBuffers, SlotBounds, StaticKVBuffers
from mmspec.core.target import KeysValues
from mmspec.errors import UserError
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


class TreeCache(Cache):
    """KV cache of a batch of sequences under tree verification.

    Prefill runs in a separate cache, whose rows are then appended to the decoding cache.

    Args:
        reserve: slots to allocate at first use.
        attending: indices of attention layers; None means all.
        static_shapes: keep shapes and addresses, see ``StaticKVBuffers``.

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
    ) -> None:
        self.attending = list(range(num_layers) if attending is None else attending)
        self.static_shapes = static_shapes
        self.kv = (StaticKVBuffers if static_shapes else KVBuffers)(len(self.attending), reserve)
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

    def tensors(self) -> list[Tensor]:
        """All buffers, to measure memory."""
        return self.kv.tensors

    def keys_values(self, layer: int, rows: int) -> KeysValues:
        """Keys and values of a layer, see ``SharesKeysValues``; with static shapes, of all slots."""
        keys, values = (states[:rows] for states in self.kv.states(layer))
        if self.bounds is not None:
            return KeysValues(keys, values, self.bounds.lengths[:rows], self.version)
        lengths = on_device(self.lengths[:rows], keys.device)
        return KeysValues(keys[:, :, : self.length], values[:, :, : self.length], lengths, self.version)

    def reserve_nodes(self, nodes: int) -> None:
        """Reserve KV slots for the next pass; a captured pass cannot allocate."""
        start = self.get_seq_length()
        self.kv.allocate(self.rows, start + nodes, start)

    def set_write_slots(self, nodes: int) -> None:
        """Set the write slots of the next pass, with static shapes. Captured."""
        assert isinstance(self.kv, StaticKVBuffers)
        self.kv.set_write_slots(nodes, self.offset)

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        """Extra keyword arguments of the decoder's forward in a verify pass, for layers other than attention.

        Args:
            reach: (batch, nodes, earlier + nodes) bool, ancestors of each node among the uncommitted nodes.
        """
        return {}

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
        """Append rows of another cache, e.g. after a prefill.

        Args:
            reserve: total slots that the longest of these rows may need.
            chosen: indices of the rows; None appends all.
        """
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

    def truncate(self, length: int) -> None:
        """Drop the tokens of a single row from ``length`` on."""
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
