"""The steps of a hidden-state drafter at fixed shapes and addresses, so that they can be captured: absorbing what was
accepted and growing the whole next tree is one replay, and the host looks at nothing in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.budget import Budget
from mmspec.graphs import Graphed
from mmspec.target import Step
from mmspec.transfer import on_device
from mmspec.tree import TokenTree
from mmspec.verify import Verdict

if TYPE_CHECKING:
    from vision.drafters.msd import MSD


class Captured:
    """What ``MSD`` does between prompts where its cache stays in place.

    Args:
        drafter: its cache and network are used.

    Attributes:
        position: (batch,) int64, of the next entry of each row.
        guess, carried: (batch, hidden) each, as ``MSD`` has them.
    """

    def __init__(self, drafter: MSD) -> None:
        self._drafter = drafter
        self._grow = Graphed(self._grown)
        self._absorb = Graphed(self._absorbed)
        self.position = self.guess = self.carried = torch.empty(0)
        # Of each step: its tokens, states and lengths, and the lengths on the host.
        self._pending: list[tuple[tuple[Tensor, Tensor, Tensor], list[int]]] = []

    def begin(self, positions: list[int], guess: Tensor, carried: Tensor) -> None:
        """A prompt was absorbed: entries of each row, and what was said behind it."""
        fresh = {"position": on_device(positions, guess.device), "guess": guess, "carried": carried}
        for name, value in fresh.items():
            held = getattr(self, name)
            if (held.shape, held.dtype, held.device) == (value.shape, value.dtype, value.device):
                held.copy_(value)
            else:
                setattr(self, name, value.clone())
        self._pending = []

    def observe(self, verdict: Verdict, step: Step) -> None:
        """Note what was accepted, with its true states."""
        path = verdict.path.clamp(min=0)
        states = step.hidden.gather(1, path[..., None].expand(-1, -1, step.hidden.shape[2]))
        kept = [len(path) for path, _ in verdict.host]
        self._pending.append(((verdict.tokens, states, verdict.length), kept))

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        """See ``Drafter``. Depth and size do not depend on how much is left to say."""
        drafter, cache = self._drafter, self._drafter.cache
        nothing = token[:, None][:, :0], self.guess[:, None][:, :0], torch.zeros_like(token)
        *earlier, last = self._pending or [(nothing, [])]
        for step, kept in earlier:  # nothing was drafted behind them
            self._absorb(*step, version=drafter.version(step[0].shape[1]))
            cache.count(kept)
        depth = min(drafter.depth, budget.depth)
        nodes = min(budget.nodes, drafter.total_tokens)
        step, kept = last
        version = drafter.version(step[0].shape[1])
        tokens, parents = self._grow(token, *step, version=version, nodes=nodes, depth=depth)
        if kept:
            cache.count(kept)
        self._pending = []
        tree = TokenTree(tokens, parents, check=False)
        tree.max_depth = min(depth, tree.nodes - 1)
        return tree

    def _grown(
        self, token: Tensor, tokens: Tensor, states: Tensor, length: Tensor, nodes: int, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Absorb a step, and grow the next tree: its tokens and parents."""
        if tokens.shape[1]:
            self._absorbed(tokens, states, length)
        tree = self._drafter.grow(token, self.guess, self.carried, Budget(nodes, depth))
        return tree.tokens, tree.parents

    def _absorbed(self, tokens: Tensor, states: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        """Take in accepted tokens, (batch, width), with true states, (batch, width, hidden), as many as ``length``,
        (batch,), says."""
        drafter, network = self._drafter, self._drafter.network
        batch, width = tokens.shape
        x = network.combine(drafter.target.embed(tokens), states, None)
        chain = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril().expand(batch, 1, -1, -1)
        outputs = drafter.forward(x, drafter.rotation(0, width, 1), chain)
        step = torch.arange(width, device=tokens.device)
        drafter.cache.keep(torch.where(step < length[:, None], step, -1))
        self.position += length
        last = (length - 1).clamp(min=0)[:, None, None].expand(-1, -1, outputs.shape[2])
        guess, carried = network.begin(outputs.gather(1, last)[:, 0])
        fed = length[:, None] > 0
        self.guess.copy_(torch.where(fed, guess, self.guess))
        self.carried.copy_(torch.where(fed, carried, self.carried))
        return ()
