"""Base class of look-up drafters on the host, whose trees are grown best first, and probabilities from counts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter
from mmspec.core.target import TargetOutput
from mmspec.core.tree import TokenTree, build_tree
from mmspec.core.verify import Verdict
from mmspec.drafters.growth import best_first

Children = Callable[[Any], Iterable[tuple[int, float, Any]]]


class LookUpDrafter(Drafter):
    """Look-up drafter on the host. Subclasses define ``begin``, which appends to ``rows``, and ``start``.

    Attributes:
        rows: what is known of each row.
        width: maximum children per node; 1 drafts chains, None trees of any width.
    """

    def __init__(self) -> None:
        self.width: int | None = None
        self.rows: list[Any] = []

    @abstractmethod
    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Any, Children]:
        """The state after a row's tokens and ``path``, and the children of states; see ``best_first``."""

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        limits = (budget.max_depth, budget.nodes, budget.floor, 1 if budget.chain else self.width)
        starts = map(self.start, range(len(self.rows)))
        rows = [best_first(state, children, *limits) for state, children in starts]
        return build_tree(token, [row[:2] for row in rows], [row[2] for row in rows])

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        state, children = self.start(row, path)
        return [(token, p) for token, p, _ in children(state)]

    def draft_chains(self, length: int) -> None:
        self.width = 1

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """No-op: the engine extends the history, whose end is looked up."""


_ESCAPE = 0.5  # weight of all shorter contexts against one occurrence of a context


def mixed(contexts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    """Probabilities of next tokens from counts in contexts: prediction by partial matching.

    Args:
        contexts: counts of the tokens after each context, the longest context first.
    """
    probs: dict[int, float] = {}
    weight = 1.0
    for counts in contexts:
        total = sum(counts.values()) + _ESCAPE
        for token, count in counts.items():
            probs[token] = probs.get(token, 0.0) + weight * count / total
        weight *= _ESCAPE / total
    return probs
