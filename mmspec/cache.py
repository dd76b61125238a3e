"""A preallocated KV cache that a tree is written behind, and that keeps the accepted path by moving it up.

All layers share one buffer (layers * 2, batch, kv_heads, slots, head_dim), so that a commit is one gather and one
scatter for the whole model. Rows of a batch have their own lengths: a forward pass writes its tokens from the longest
row's end on, and ``attended`` tells which slots of a row hold committed tokens.

A cache may be told to stay *in place*: then a pass finds on the device where the rows end, writes there whatever the
host knows, and hands out the whole buffer, so that every pass of a size is the same work at the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mmspec.errors import UserError
from mmspec.ops import compact_kv

_ROUND = 256  # slots; buffers of requests of about one length are of one size


@dataclass(frozen=True)
class Ends:
    """Where the rows of a cache stand, on the device. The tensors stay where they are and change in place.

    Attributes:
        begin, end: (batch,) int64, a row's committed slots are ``begin <= slot < end``.
        start: (1,) int64, where a pass writes its first node: the greatest ``end``.
    """

    begin: Tensor
    end: Tensor
    start: Tensor


class TreeCache(Cache):
    """KV cache of one batch of sequences under tree verification.

    Args:
        num_layers: layers of the model.
        reserve: slots to allocate at first use; more are added by doubling when needed.
        max_length: the model's context limit in tokens; None for no limit.
        attending: the layers that have keys and values; None means all.
        in_place: see above. Prompts may be padded on the left only then, and rows are read by ``ends``.

    Attributes:
        attending: as above, in order.
        length: slots in use, i.e. the length of the longest row; forwards write from here on.
        lengths: committed tokens of each row (prompt padding included).
        attended: (batch, slots) bool, committed slots of each row.
        ends: where the rows stand, if the cache stays in place and has a prompt.
        version: another one whenever a buffer has moved.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        reserve: int = 512,
        max_length: int | None = None,
        attending: Sequence[int] | None = None,
        in_place: bool = False,
    ) -> None:
        self.attending = list(range(num_layers) if attending is None else attending)
        self.length = 0
        self.offset = 0
        self.lengths: list[int] = []
        self.max_length = max_length
        self.reserve = reserve
        self.in_place = in_place
        self.ends: Ends | None = None
        self.version = object()
        self.padded = False
        self._at: Tensor | None = None  # (nodes,) slots of the pass under way, if it is in place
        self._storage: Tensor | None = None
        self._attended: Tensor | None = None
        place = {layer: place for place, layer in enumerate(self.attending)}
        super().__init__(layers=[_Layer(self, layer, place.get(layer, -1)) for layer in range(num_layers)])

    @property
    def capacity(self) -> int:
        return self._storage.shape[3] if self._storage is not None else 0

    @property
    def attended(self) -> Tensor:
        assert self._attended is not None, "the prompt comes first"
        return self._attended[:, : self.length]

    def room(self, tokens: int, like: Tensor) -> Tensor:
        """The shared buffer, with at least ``tokens`` free slots. ``like``: (batch, kv_heads, tokens, head_dim)."""
        need = self.length + self.offset + tokens
        at_least = tokens if self.length == 0 else self.length + 1
        if self.max_length is not None and at_least > self.max_length:
            raise UserError(f"the model's context limit is {self.max_length} tokens: {at_least} are needed")
        # The last slot is never read: padding entries of a ragged commit are written there.
        if self._storage is None or need >= self.capacity:
            slots = max(need + 1, self.reserve if self._storage is None else 2 * self.capacity)
            slots += -slots % _ROUND if self.in_place else 0
            self.version = object()
            batch, heads, _, head_dim = like.shape
            grown = like.new_zeros(2 * len(self.attending), batch, heads, slots, head_dim)
            if self._storage is not None:
                grown[:, :, :, : self.length + self.offset] = self._storage[:, :, :, : self.length + self.offset]
            self._storage = grown
        return self._storage

    def serves(self, batch: int, reserve: int, like: Tensor) -> bool:
        """Whether another prompt can take this cache as it is; ``like`` tells device and precision of the model."""
        kept = self._storage
        fits = not self.attending or (
            kept is not None and self.capacity > reserve and (kept.device, kept.dtype) == (like.device, like.dtype)
        )
        return self.in_place and len(self.lengths) == batch and fits

    def reset(self) -> None:
        """Forget the prompt and what followed; buffers stay."""
        self.length = self.offset = 0
        self.lengths = []
        self._at = None

    def enter(self, nodes: int) -> None:
        """A pass over so many nodes begins; to be called, for caches that stay in place, where it is captured."""
        assert self.ends is not None, "the prompt comes first"
        self._at = self.ends.start + torch.arange(self.offset, self.offset + nodes, device=self.ends.start.device)

    def make_room(self, nodes: int) -> None:
        """Grow, if need be, before such a pass."""
        if self._storage is not None:
            self.room(nodes, self._storage[0])

    def arguments(self, reach: Tensor) -> dict[str, Any]:
        """What else the decoder's forward is to be given for a pass over nodes, for layers other than attention.

        Args:
            reach: (batch, nodes, earlier + nodes) bool, which nodes behind the prefix each new node follows.
        """
        return {}

    def commit_prompt(self, tokens: int, attention_mask: Tensor | None, batch: int, device: torch.device) -> None:
        """Keep all ``tokens`` that the prefill wrote; ``attention_mask`` (batch, tokens) marks the padding with 0."""
        self._attended = torch.zeros(batch, max(self.capacity, tokens), dtype=torch.bool, device=device)
        self._attended[:, :tokens] = True if attention_mask is None else attention_mask[:, :tokens].bool()
        self.padded = attention_mask is not None
        self.length, self.lengths = tokens, [tokens] * batch
        if self.in_place:
            self._stand(tokens, attention_mask, batch, device)

    def _stand(self, tokens: int, attention_mask: Tensor | None, batch: int, device: torch.device) -> None:
        begin = torch.zeros(batch, dtype=torch.long, device=device)
        if attention_mask is not None:
            begin = tokens - attention_mask[:, :tokens].long().sum(1)
        if self.ends is None:
            self.ends = Ends(begin, torch.full_like(begin, tokens), torch.full_like(begin[:1], tokens))
        else:
            self.ends.begin.copy_(begin)
            self.ends.end.fill_(tokens)
            self.ends.start.fill_(tokens)

    def keep(self, path: Tensor) -> None:
        """Keep the accepted path of each row, (batch, depth) padded with -1, as far as the device is concerned; the
        host learns of it by ``count``. For caches that stay in place."""
        assert self.ends is not None, "the prompt comes first"
        if self._storage is not None:
            compact_kv(self._storage, path, self.ends.start, self.ends.end)
        self.ends.end.add_((path >= 0).sum(1))
        self.ends.start.copy_(self.ends.end.amax(0, keepdim=True))

    def count(self, kept: Sequence[int]) -> None:
        """So many nodes of each row were kept."""
        self.lengths = [length + more for length, more in zip(self.lengths, kept, strict=True)]
        self.length = max(self.lengths)
        self.offset = 0

    def commit(self, path: Tensor, rows: list[list[int]]) -> None:
        """Keep the accepted path of each row, in place; everything else behind ``length`` is forgotten.

        Args:
            path: (batch, depth) int64, node indices padded with -1; node i stands in slot ``length + i``.
            rows: the same paths as Python lists without padding; an empty one leaves its row as it is.
        """
        if self.in_place:
            self.keep(path)
        elif self.attending:
            self._keep(path, rows)
        self.count(list(map(len, rows)))
        self.padded = self.padded or min(self.lengths) != self.length

    def _keep(self, path: Tensor, rows: list[list[int]]) -> None:
        assert self._attended is not None
        if self._attended.shape[1] < self.capacity:
            extra = self._attended.new_zeros(len(rows), self.capacity - self._attended.shape[1])
            self._attended = torch.cat([self._attended, extra], dim=1)
        start, longest = self.length, max(map(len, rows))
        in_place = all(n == start for n in self.lengths) and all(r == list(range(len(r))) for r in rows)
        if not in_place:
            self._move(path[:, :longest], rows, start)
        for row, kept in enumerate(rows):
            self._attended[row, self.lengths[row] : self.lengths[row] + len(kept)] = True

    def _move(self, path: Tensor, rows: list[list[int]], start: int) -> None:
        storage = self._storage
        assert storage is not None
        if len(rows) == 1:
            slot = self.lengths[0]
            storage[:, :, :, slot : slot + path.shape[1]] = storage[:, :, :, start + path[0]]
            return
        steps = torch.arange(path.shape[1], device=path.device)
        begin = torch.tensor(self.lengths, device=path.device)[:, None]
        target = torch.where(path >= 0, begin + steps, self.capacity - 1)
        row = torch.arange(len(rows), device=path.device)[:, None]
        storage[:, row, :, target] = storage[:, row, :, start + path.clamp(min=0)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length + self.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class _Layer(CacheLayerMixin):
    """One layer's window into the shared buffer, with the interface that transformers' models expect."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int, place: int) -> None:
        super().__init__()
        self.cache, self.index, self.place = cache, index, place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache.room(0, key_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        count = key_states.shape[2]
        storage = self.cache.room(count, key_states)
        expected = (*storage.shape[1:3], count, storage.shape[4])
        if key_states.shape != expected or value_states.shape != expected:
            raise UserError(
                f"all layers must have keys and values of one shape: expected {expected}, "
                f"layer {self.index} has {tuple(key_states.shape)} and {tuple(value_states.shape)}"
            )
        keys, values = storage[2 * self.place], storage[2 * self.place + 1]
        if self.cache._at is not None:
            keys.index_copy_(2, self.cache._at, key_states)
            values.index_copy_(2, self.cache._at, value_states)
            return keys, values
        begin = self.cache.length + self.cache.offset
        keys[:, :, begin : begin + count] = key_states
        values[:, :, begin : begin + count] = value_states
        return keys[:, :, : begin + count], values[:, :, : begin + count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length + self.cache.offset

    def get_max_length(self) -> int:
        return -1
