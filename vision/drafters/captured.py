"""The steps of a hidden-state drafter at fixed shapes and addresses."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.budget import Budget
from mmspec.drafters.captured import CapturedSteps, hold
from mmspec.target import Step
from mmspec.transfer import on_device
from mmspec.tree import TokenTree
from mmspec.verify import Verdict

if TYPE_CHECKING:
    from vision.drafters.msd import MSD


class Captured(CapturedSteps):
    """What ``MSD`` does between prompts where its cache stays in place.

    Args:
        drafter: its cache and network are used.

    Attributes:
        position: (batch,) int64, of the next entry of each row.
        guess, carried: (batch, hidden) each, as ``MSD`` has them.
    """

    def __init__(self, drafter: MSD) -> None:
        super().__init__()
        self._drafter = drafter
        self.position = self.guess = self.carried = torch.empty(0)

    def begin(self, positions: list[int], guess: Tensor, carried: Tensor) -> None:
        """A prompt was absorbed: entries of each row, and what was said behind it."""
        hold(self, position=on_device(positions, guess.device), guess=guess, carried=carried)
        none = self.position[:, None][:, :0]
        self.start((none, self.guess[:, None][:, :0], torch.zeros_like(self.position)))

    def observe(self, verdict: Verdict, step: Step) -> None:
        """Note what was accepted, with its true states."""
        path = verdict.path.clamp(min=0)
        states = step.hidden.gather(1, path[..., None].expand(-1, -1, step.hidden.shape[2]))
        self.note((verdict.tokens, states, verdict.length), [len(path) for path, _ in verdict.host])

    def limits(self) -> tuple[int, int]:
        return self._drafter.depth, self._drafter.total_tokens

    def make_room(self, width: int) -> Hashable:
        return self._drafter.version(width)

    def count(self, kept: list[int]) -> None:
        self._drafter.cache.count(kept)

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        self._drafter.cache.offset = 0  # an attempt to capture may have ended half-way
        return self._drafter.grow(token, self.guess, self.carried, budget)

    def absorb(self, tokens: Tensor, states: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Take in accepted tokens, (batch, width), with true states, (batch, width, hidden), as many as ``length``,
        (batch,), says."""
        drafter, network = self._drafter, self._drafter.network
        drafter.cache.offset = 0
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
