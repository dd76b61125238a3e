"""The steps of the mamba drafter at fixed shapes and addresses."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.budget import Budget
from mmspec.drafters.captured import CapturedSteps
from mmspec.tree import TokenTree
from mmspec.verify import Verdict
from ssm.drafters.network import State

if TYPE_CHECKING:
    from ssm.drafters.mamba import Mamba


class Captured(CapturedSteps):
    """What ``Mamba`` does between prompts where shapes are fixed.

    Args:
        drafter: its network is used.

    Attributes:
        state: of each row, behind what was absorbed.
        root: (batch, hidden), what that says of the next token.
    """

    def __init__(self, drafter: Mamba) -> None:
        super().__init__()
        self._drafter = drafter
        self.state: State = ()
        self.root = torch.empty(0)
        self._version = object()

    def begin(self, state: State, root: Tensor, first: Tensor) -> None:
        """A prompt was absorbed, which left ``state``, and behind which ``first``, (batch, 1), was said."""
        if self.root.shape != root.shape or self.root.device != root.device:
            self._version, self.root = object(), root.clone()
            self.state = tuple((window.clone(), s.clone()) for window, s in state)
        self._hold(state)
        self.start((first[:, :0], torch.zeros_like(first[:, 0])))
        self.note((first, torch.ones_like(first[:, 0])), [])

    def observe(self, verdict: Verdict) -> None:
        """Note what was accepted."""
        self.note((verdict.tokens, verdict.length), [])

    def limits(self) -> tuple[int, int]:
        return self._drafter.depth, self._drafter.total_tokens

    def make_room(self, width: int) -> Hashable:
        return self._version

    def count(self, kept: list[int]) -> None:
        """A state needs no counting."""

    def grow(self, token: Tensor, budget: Budget) -> TokenTree:
        return self._drafter.grow(token, self.state, self.root, budget)

    def absorb(self, tokens: Tensor, length: Tensor) -> None:  # type: ignore[override]
        """Take in accepted tokens, (batch, width), as many as ``length``, (batch,), says."""
        keep = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
        hidden, state = self._drafter.network(tokens, keep, self.state)
        self._hold(state)
        last = (length - 1).clamp(min=0)[:, None, None].expand(-1, -1, hidden.shape[2])
        self.root.copy_(torch.where(length[:, None] > 0, hidden.gather(1, last)[:, 0], self.root))

    def _hold(self, state: State) -> None:
        for mine, new in zip(self.state, state, strict=True):
            for held, value in zip(mine, new, strict=True):
                held.copy_(value)
