"""A drafter that learns, copied for every sequence, so that no request's tokens show up in another's draft trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.drafters.drafter import Drafter, features, fork
from mmspec.speculation.budget import Budget
from mmspec.speculation.tree import TokenTree
from mmspec.speculation.verify import Verdict
from mmspec.targets.target import Feature, Prompt, Step, Target


class PerSequence:
    """Drafts each sequence with a copy of ``drafter`` that is dropped with the sequence.

    Args:
        drafter: one whose trees are fixed, not drawn.
    """

    learns = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafters = [drafter]
        self._copies: list[Drafter] = []
        self._target: Target | None = None

    @property
    def features(self) -> tuple[Feature, ...]:
        return features(self.drafters[0])

    def attach(self, target: Target) -> None:
        self.drafters[0].attach(target)
        self._target = target

    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        assert self._target is not None
        for row, tokens in enumerate(history):
            mask = prompt.attention_mask
            alone = Prompt(prompt.input_ids[row : row + 1], None if mask is None else mask[row : row + 1])
            self._copies.append(fork(self.drafters[0], self._target))
            self._copies[-1].begin(alone, _row(step, row), [tokens])

    def select(self, rows: Sequence[int]) -> None:
        self._copies = [self._copies[row] for row in rows]

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        return _stack([copy.propose(one, budget) for copy, one in zip(self._copies, token.split(1), strict=True)])

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        for row, copy in enumerate(self._copies):
            copy.observe(tree.select([row]), Verdict(verdict.packed[row : row + 1]), _row(step, row))


def _row(step: Step, row: int) -> Step:
    """One row of a step."""
    values = [step.visual, step.embeds]
    visual, embeds = (None if value is None else value[row : row + 1] for value in values)
    return Step(
        step.logits[row : row + 1], {name: x[row : row + 1] for name, x in step.features.items()}, visual, embeds
    )


def _stack(trees: Sequence[TokenTree]) -> TokenTree:
    """Trees of one row each as one batch, padded to the largest."""
    if len(trees) == 1:
        return trees[0]
    widest = max(tree.nodes for tree in trees)

    def rows(values: Sequence[Tensor], padding: float) -> Tensor:
        return torch.cat([F.pad(value, (0, widest - value.shape[1]), value=padding) for value in values])

    valid = [torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid for tree in trees]
    probs = [torch.zeros(1, 1, device=t.tokens.device) if t.nodes == 1 else t.log_probs for t in trees]
    known = [one for one in probs if one is not None]
    stacked = TokenTree(
        rows([tree.tokens for tree in trees], 0),
        rows([tree.parents for tree in trees], 0),
        rows(valid, False),
        log_probs=rows(known, -torch.inf) if len(known) == len(trees) else None,
        check=False,
    )
    stacked.max_depth = max(tree.max_depth for tree in trees)
    return stacked
