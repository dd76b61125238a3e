"""Drafters for checks: drafts that are correct for a known number of tokens, and drafts only in every second step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.core.drafter import Drafter, Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict

_DEEPEST = 6
_NODES = 2 * _DEEPEST + 3


class NowAndThen(Wrapper):
    """Uses another drafter only in every second step, so that accepted drafts and plain steps alternate."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._steps = 0

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        self._steps += 1
        return self.drafter.propose(token, plan) if self._steps % 2 else TokenTree.root(token)


class Rehearsed(Drafter):
    """Drafts 1 to 6 tokens of a known answer, then wrong tokens, in most steps with wrong siblings.

    This accepts and rejects drafts at all depths, regardless of the user's drafter.

    Args:
        answer: token ids. Sequences that diverge from it get no drafts.
    """

    learns = False

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = list(answer)
        self._rows: list[tuple[list[int], int]] = []  # history and prompt length
        self._steps = 0

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        self._rows += [(tokens, len(tokens) - 1) for tokens in history]

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        self._steps += 1
        trees = [self._tree(*row, plan.depth) for row in self._rows]
        most = _NODES if any(len(tokens) for tokens, _ in trees) else 0
        tokens, parents, valid = [], [], []
        for drafted, above in trees:
            padding = most - len(drafted)
            tokens.append(drafted + [0] * padding)
            parents.append([-1, *above] + [0] * padding)
            valid.append([True] * (1 + len(drafted)) + [False] * padding)
        device = token.device
        drafts = torch.tensor(tokens, dtype=torch.long, device=device).view(len(token), -1)
        return TokenTree(
            torch.cat([token[:, None], drafts], dim=1),
            torch.tensor(parents, dtype=torch.long, device=device),
            torch.tensor(valid, dtype=torch.bool, device=device),
            check=False,
        )

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """No-op: this drafter does not learn."""

    def _tree(self, history: list[int], prompt: int, depth: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the drafted nodes of a row."""
        emitted = history[prompt:]
        ahead = self._answer[len(emitted) :][:depth] if self._answer[: len(emitted)] == emitted else []
        right = ahead[: 1 + self._steps % _DEEPEST]
        tokens: list[int] = []
        parents: list[int] = []
        last = 0
        for token in right:
            level = ([token], [token, _other(token)], [_other(token), token])[self._steps % 3]
            tokens += level
            parents += [last] * len(level)
            last = 1 + len(tokens) - len(level) + level.index(token)
        for token in ahead[len(right) :][:2]:
            tokens.append(_other(token))
            parents.append(last)
            last = len(tokens)
        return tokens, parents


def _other(token: int) -> int:
    return token - 1 if token else 1
