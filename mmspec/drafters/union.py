"""Drafter ensemble: the union of several drafters' trees."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter, as_drafter
from mmspec.core.target import Feature, Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree, merge
from mmspec.core.verify import Verdict
from mmspec.errors import UserError


class Union(Drafter):
    """Merges the trees of several drafters; the budget prunes the union to its most probable nodes.

    Args:
        drafters: at least two, whose trees have ``log_probs``.

    Raises:
        UserError: fewer than two drafters.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if len(drafters) < 2:
            raise UserError(f"drafters joined by + must be at least two: got {len(drafters)}")
        self.drafters: list[Drafter] = [as_drafter(drafter) for drafter in drafters]

    @property
    def members(self) -> list[Drafter]:
        return [member for drafter in self.drafters for member in drafter.members]

    @property
    def learns(self) -> bool:
        return any(drafter.learns for drafter in self.drafters)

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(dict.fromkeys(feature for drafter in self.drafters for feature in drafter.features))

    def attach(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.attach(target)

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        for drafter in self.drafters:
            drafter.begin(prompt, output, history)

    def select(self, rows: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.select(rows)

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        return merge([drafter.propose(token, budget) for drafter in self.drafters])

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        """See ``Drafter``; the maximum of the drafters' probabilities."""
        probs: dict[int, float] = {}
        for drafter in self.drafters:
            for token, p in drafter.continuations(row, path):
                probs[token] = max(p, probs.get(token, 0.0))
        total = max(1.0, sum(probs.values()))
        return [(token, p / total) for token, p in probs.items()]

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        for drafter in self.drafters:
            drafter.observe(tree, verdict, output)
