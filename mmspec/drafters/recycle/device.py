"""Token Recycling on the device: table updates and drafting with static shapes and no host syncs.

Differences from the host table of ``drafter``: two-token contexts are hashed into a fixed number of slots, later ones
overwriting earlier ones; and if a context occurs several times in a step, only its last node counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.core.budget import Budget
from mmspec.core.target import TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import CapturedDrafter, RowState
from mmspec.drafters.growth import grow_tree

if TYPE_CHECKING:
    from mmspec.drafters.recycle.drafter import Context, Ranking, Recycle

NEWEST = 0.3  # weight of the latest ranking in the running average
UNLIKELY = 0.005  # minimum probability of a stored successor
_SLOTS = 1 << 17  # hash slots of two-token contexts
_DEPTH, _NODES = 6, 512  # maximum tree size; twice the depth did not raise acceptance
_HASH = -7046029254386353131  # Fibonacci hashing: 2**64 / golden ratio


class Rankings:
    """Table of successors and their probabilities per context, in descending order.

    Args:
        slots: number of contexts; one extra slot is a write sink.
        width: successors per context.

    Attributes:
        key: (slots + 1,) int64, context of each slot; -1 if empty.
        tokens, probs: (slots + 1, width), padded with 0.
    """

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self.key = torch.full((slots + 1,), -1, device=device)
        self.tokens = torch.zeros(slots + 1, width, dtype=torch.long, device=device)
        self.probs = torch.zeros(slots + 1, width, device=device)

    def look_up(self, slot: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and probabilities, (..., width) each, of contexts, (...); unknown contexts have probabilities 0."""
        return self.tokens[slot], self.probs[slot].where((self.key[slot] == key)[..., None], 0.0)

    def average(self, slot: Tensor, key: Tensor, counts: Tensor, tokens: Tensor, probs: Tensor, newest: float) -> None:
        """Update running averages with new rankings, of weight ``newest``.

        Args:
            slot, key, counts: (contexts,); ``counts`` bool, False for idle rows.
            tokens, probs: (contexts, k).
        """
        later = ((slot[:, None] == slot) & counts).triu(1).any(1)
        slot = slot.where(counts & ~later, len(self.key) - 1)
        known = (self.key[slot] == key)[:, None]
        held, share = self.tokens[slot], self.probs[slot].where(known, 0.0) * (1.0 - newest)
        probs = torch.where(known, newest * probs, probs)
        both = (tokens[:, :, None] == held[:, None]) & (share > 0.0)[:, None]  # (contexts, k, width)
        share = share + (both * probs[:, :, None]).sum(1)
        best, at = torch.cat([share, probs.where(~both.any(2), 0.0)], dim=1).topk(share.shape[1], dim=1)
        self.key[slot] = key
        self.tokens[slot] = torch.cat([held, tokens], dim=1).gather(1, at)
        self.probs[slot] = best


class Recycled(CapturedDrafter):
    """``Recycle`` with static shapes.

    Attributes:
        last: (rows, 2) int64, the token before the root, and the root.
    """

    def __init__(self, drafter: Recycle, vocab: int, device: torch.device) -> None:
        self._drafter, self._vocab = drafter, vocab
        self._any = Rankings(vocab, 2 * drafter.top_k, device)
        self._pairs = Rankings(_SLOTS if drafter.pairs else 0, 2 * drafter.top_k, device)
        super().__init__()

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self.last = RowTensor(static_shapes)

    @property
    def device(self) -> torch.device:
        return self._any.key.device

    @property
    def parts(self) -> tuple[RowState, ...]:
        return (self.last,)

    @property
    def limits(self) -> tuple[int, int]:
        return _DEPTH, _NODES

    def forget(self) -> None:
        self._any.key.fill_(-1)
        self._pairs.key.fill_(-1)

    @torch.inference_mode()
    def begin(self, ends: Tensor, output: TargetOutput, first: Tensor) -> None:  # type: ignore[override]
        """Append rows for new sequences.

        Args:
            ends: (new rows, 2) int64, the last two tokens of each prompt.
            first: (new rows,) int64, the first emitted tokens.
        """
        self.join(len(ends), True)
        ends = ends.clamp(0, self._vocab - 1)  # -1 before a prompt of one token; prompt tokens outside the vocabulary
        self.last.append(torch.stack([ends[:, 1], first], dim=1))
        ranked = ops.top_log_probs(output.logits[:, 0], self._drafter.top_k)
        self._learn(ends[:, 0], ends[:, 1], torch.ones_like(first, dtype=torch.bool), *ranked)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        steps, self._pending = self._pending, []
        self._update_all(steps)  # removed rows still update the table
        super().select(rows)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the rankings at every node, and the accepted tokens."""
        ranked = ops.top_log_probs(output.logits, self._drafter.top_k)
        self.queue((tree.tokens, tree.parents, *ranked, verdict.tokens), verdict)

    def update(  # type: ignore[override]
        self, tokens: Tensor, parents: Tensor, ranked: Tensor, log_probs: Tensor, emitted: Tensor, length: Tensor
    ) -> None:
        """Update the table with the rankings, (batch, nodes, k), at a tree's nodes, (batch, nodes), and advance
        ``last`` by ``emitted``, (batch, depth)."""
        last = self.last.data[: len(tokens)]
        before = torch.where(parents >= 0, tokens.gather(1, parents.clamp(min=0)), last[:, :1])
        counts = (length > 0)[:, None].expand_as(tokens)
        self._learn(*(x.flatten(0, 1) for x in (before, tokens, counts, ranked, log_probs)))
        both = torch.cat([last, emitted], dim=1)
        self.last.write(both.gather(1, length[:, None] + torch.arange(2, device=length.device)))

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        above = self.last.data[: len(token), :1]

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal above
            before, above = above.gather(1, origin), beam
            return self._children(before, beam)

        return grow_tree(token, None, extend, budget, self._drafter.top_k)

    def _children(self, before: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Successors of contexts, (...), and their log probabilities, (..., width) each."""
        tokens, probs = self._any.look_up(token, token)
        if self._drafter.pairs:
            key = self._pair(before, token)
            exactly, chances = self._pairs.look_up(self._slot(key), key)
            known = (chances[..., :1] > 0.0).expand_as(chances)
            tokens, probs = torch.where(known, exactly, tokens), torch.where(known, chances, probs)
        most = self._drafter.width or probs.shape[-1]
        return tokens[..., :most], probs[..., :most].log()

    def _learn(self, before: Tensor, token: Tensor, counts: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Update the table with rankings, (contexts, k), of contexts, (contexts,)."""
        probs = log_probs.exp()
        probs = probs.where(probs >= UNLIKELY, 0.0)
        ranking = counts, tokens, probs, NEWEST
        self._any.average(token, token, *ranking)
        if self._drafter.pairs:
            key = self._pair(before, token)
            self._pairs.average(self._slot(key), key, *ranking)

    def _pair(self, before: Tensor, token: Tensor) -> Tensor:
        return before * self._vocab + token

    def _slot(self, key: Tensor) -> Tensor:
        return ((key * _HASH) >> 40) & (len(self._pairs.key) - 2)

    def fill(self, table: Mapping[Context, Ranking]) -> None:
        """Copy the host table; the last of colliding contexts wins."""
        for pairs, kept in ((False, self._any), (True, self._pairs)):
            chosen = {context: ranking for context, ranking in table.items() if (context[0] >= 0) == pairs}
            if not chosen or (pairs and not self._drafter.pairs):
                continue
            best = [sorted(ranking.items(), key=lambda item: -item[1]) for ranking in chosen.values()]
            width = kept.tokens.shape[1]
            rows = [row[:width] + [(0, 0.0)] * (width - len(row)) for row in best]
            before, token = torch.tensor([*chosen]).unbind(1)
            key = self._pair(before, token) if pairs else token
            slot = self._slot(key) if pairs else key
            place = {int(at): number for number, at in enumerate(slot)}  # the last one of each
            order = torch.tensor([*place.values()])
            where = torch.tensor([*place], device=kept.key.device)
            kept.key[where] = key[order].to(where.device)
            kept.tokens[where] = torch.tensor([[t for t, _ in row] for row in rows])[order].to(where.device)
            kept.probs[where] = torch.tensor([[p for _, p in row] for row in rows])[order].to(where.device)

    def entries(self) -> Iterator[tuple[Context, Ranking]]:
        """Iterate over the table in the host table's format."""
        for pairs, kept in ((False, self._any), (True, self._pairs)):
            key, tokens, probs = (x[:-1] for x in (kept.key, kept.tokens, kept.probs))
            at = (key >= 0).nonzero()[:, 0]
            for number, row, chances in zip(key[at].tolist(), tokens[at].tolist(), probs[at].tolist(), strict=True):
                context = divmod(number, self._vocab) if pairs else (-1, number)
                yield context, {token: p for token, p in zip(row, chances, strict=True) if p > 0.0}
