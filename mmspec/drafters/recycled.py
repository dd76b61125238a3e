"""The table of Token Recycling on a device: it learns and drafts there, at fixed shapes and addresses, so that the host
neither waits for rankings nor looks them up.

What it holds is what the table of ``mmspec.drafters.recycle`` holds, with two exceptions: contexts of two tokens share
a number of slots, where a later one takes the place of an earlier one; and of a context that a step has several times,
the last node counts alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec import ops
from mmspec.budget import Budget
from mmspec.drafters.captured import CapturedSteps, hold
from mmspec.drafters.growth import grow_tree
from mmspec.target import Step
from mmspec.tree import TokenTree
from mmspec.verify import Verdict

if TYPE_CHECKING:
    from mmspec.drafters.recycle import Context, Ranking, Recycle

NEWEST = 0.3  # weight of the latest ranking in the running average
UNLIKELY = 0.005  # successors below this probability are not worth their place
_SLOTS = 1 << 17  # for contexts of two tokens
_DEPTH, _NODES = 6, 512  # of a tree at most; with twice the depth no more was accepted
_SPREAD = -7046029254386353131  # 2**64 over the golden ratio: its multiples spread evenly


class Rankings:
    """Successors of contexts and their probabilities, likeliest first.

    Args:
        slots: for contexts; one more is nobody's, where goes what is not to be kept.
        width: successors kept per context.

    Attributes:
        key: (slots + 1,) int64, the context that a slot holds; -1 none.
        tokens, probs: (slots + 1, width), 0 where there are fewer.
    """

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self.key = torch.full((slots + 1,), -1, device=device)
        self.tokens = torch.zeros(slots + 1, width, dtype=torch.long, device=device)
        self.probs = torch.zeros(slots + 1, width, device=device)

    def look_up(self, slot: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and probabilities, (..., width) each, of contexts, (...); probabilities are 0 where it is unknown."""
        return self.tokens[slot], self.probs[slot].where((self.key[slot] == key)[..., None], 0.0)

    def average(self, slot: Tensor, key: Tensor, counts: Tensor, tokens: Tensor, probs: Tensor, newest: float) -> None:
        """Average rankings into those that are held, with a weight of ``newest``.

        Args:
            slot, key, counts: (contexts,), ``counts`` bool, whether to learn from it at all.
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


class Recycled(CapturedSteps):
    """What ``Recycle`` does where shapes are fixed.

    Args:
        drafter: its settings are used.
        vocab: tokens of the vocabulary.

    Attributes:
        last: (batch, 2) int64, the token before the root, and the root.
    """

    def __init__(self, drafter: Recycle, vocab: int, device: torch.device) -> None:
        super().__init__()
        self._drafter, self._vocab = drafter, vocab
        self._any = Rankings(vocab, 2 * drafter.top_k, device)
        self._pairs = Rankings(_SLOTS if drafter.pairs else 0, 2 * drafter.top_k, device)
        self.last = torch.empty(0)
        self._version = object()

    def begin(self, ends: Tensor, step: Step, first: Tensor) -> None:
        """A prompt was absorbed that ends with ``ends``, (batch, 2), and behind which ``first``, (batch,), was said."""
        ends = ends.clamp(0, self._vocab - 1)  # a prompt may have but one token, or some that cannot be said
        if not hold(self, last=torch.stack([ends[:, 1], first], dim=1)):
            self._version = object()
        tokens, log_probs = ops.top_log_probs(step.logits[:, 0], self._drafter.top_k)
        self._learn(ends[:, 0], ends[:, 1], torch.ones_like(first, dtype=torch.bool), tokens, log_probs)
        none, some = ends[:, :0], tokens[:, None][:, :0]
        self.start((none, none, some, log_probs[:, None][:, :0], none, torch.zeros_like(first)))

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """Note the rankings at every node, and what was accepted."""
        ranked = ops.top_log_probs(step.logits, self._drafter.top_k)
        self.note((tree.tokens, tree.parents, *ranked, verdict.tokens, verdict.length), [])

    def limits(self) -> tuple[int, int]:
        return _DEPTH, _NODES

    def make_room(self, width: int) -> Hashable:
        return self._version

    def count(self, kept: list[int]) -> None:
        """A table needs no counting."""

    def absorb(  # type: ignore[override]
        self, tokens: Tensor, parents: Tensor, ranked: Tensor, log_probs: Tensor, said: Tensor, length: Tensor
    ) -> None:
        """Learn from a tree's nodes, (batch, nodes), what was ranked there, (batch, nodes, k), and move on to behind
        what was ``said``, (batch, depth), of which ``length``, (batch,), tokens count."""
        before = torch.where(parents >= 0, tokens.gather(1, parents.clamp(min=0)), self.last[:, :1])
        fed = (length > 0)[:, None]  # a row that has finished says nothing any more
        flat = (x.flatten(0, 1) for x in (before, tokens, fed.expand_as(tokens), ranked, log_probs))
        self._learn(*flat)
        row = torch.cat([self.last, said], dim=1)
        self.last.copy_(row.gather(1, length[:, None] + torch.arange(2, device=length.device)))

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        drafter, above = self._drafter, self.last[:, 1:]
        started = False

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal above, started
            before = above.gather(1, origin) if started else above.expand_as(beam)
            above, started = beam, True
            return self._children(before, beam)

        return grow_tree(token, self._children(*self.last.unbind(1)), extend, budget, drafter.top_k)

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
        """Average rankings, (contexts, k), into those of contexts, (contexts,)."""
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
        return ((key * _SPREAD) >> 40) & (len(self._pairs.key) - 2)

    # ------------------------------------------------------------------ to the host and back

    def fill(self, table: Mapping[Context, Ranking]) -> None:
        """Take over a table of the host; of contexts that share a slot, the last."""
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
        """Everything that is held, as the table of the host has it."""
        for pairs, kept in ((False, self._any), (True, self._pairs)):
            key, tokens, probs = (x[:-1] for x in (kept.key, kept.tokens, kept.probs))
            at = (key >= 0).nonzero()[:, 0]
            for number, row, chances in zip(key[at].tolist(), tokens[at].tolist(), probs[at].tolist(), strict=True):
                context = divmod(number, self._vocab) if pairs else (-1, number)
                yield context, {token: p for token, p in zip(row, chances, strict=True) if p > 0.0}
