"""Host-side lookup drafters with best-first tree growth; several can grow one tree together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.core.drafter import Drafter
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree, best_chains, build_tree, merge
from mmspec.core.verify import Verdict
from mmspec.drafters.growth import best_first

Children = Callable[[Any], Iterable[tuple[int, float, Any]]]


class LookUpDrafter(Drafter):
    """Base class of host-side lookup drafters. Subclasses define ``begin``, which appends to ``rows``, and ``start``.

    Attributes:
        width: maximum children per node; 1 drafts chains, None trees of any width.
        reliability: initial ratio of hits to predicted probability, see ``LookUps``.
    """

    reliability = 0.7

    def __init__(self) -> None:
        self.width: int | None = None
        self.rows: list[Any] = []

    @abstractmethod
    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Any, Children]:
        """Search state after a row's tokens and ``path``, and function that expands states; see ``best_first``."""

    @property
    def on_host(self) -> bool:
        """Whether lookups run on the host instead of in a table on the device."""
        return True

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        limits = (plan.depth, plan.nodes, plan.floor, 1 if plan.chain else self.width)
        starts = map(self.start, range(len(token)))
        rows = [best_first(state, children, *limits) for state, children in starts]
        return build_tree(token, [row[:2] for row in rows], [row[2] for row in rows])

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        state, children = self.start(row, path)
        return [(token, p) for token, p, _ in children(state)]

    def draft_chains(self, length: int) -> None:
        self.width = 1

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """No-op: lookups read the history, which the engine extends."""


_STEPS = 10.0  # weight of the initial reliability, in steps
_STEPS_DECAY = 0.98  # decay of earlier steps' weight, per step
_MOST = 0.995  # maximum probability of a token


class LookUps(LookUpDrafter):
    """Combines several lookup drafters in one tree.

    A token's odds are the sum of its odds in each drafter, after scaling the drafter's probabilities by its
    reliability: the observed frequency of its top-1 next tokens divided by their predicted probability. A drafter that
    is almost certain thus takes the nodes from less certain drafters.
    """

    def __init__(self, parts: Sequence[LookUpDrafter]) -> None:
        super().__init__()
        self.parts = parts
        self._borne_out = [[_STEPS * part.reliability, _STEPS] for part in parts]  # hits, and predicted probabilities
        self._expected: dict[int, list[tuple[int, float] | None]] = {}  # each part's top-1 next token by row

    @property
    def members(self) -> list[Drafter]:
        return [member for part in self.parts for member in part.members]

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        for part in self.parts:
            part.begin(prompt, output, history)

    def select(self, rows: Sequence[int]) -> None:
        self._expected = {}
        for part in self.parts:
            part.select(rows)

    def draft_chains(self, length: int) -> None:
        super().draft_chains(length)
        for part in self.parts:
            part.draft_chains(length)

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        if all(part.on_host for part in self.parts):
            return super().propose(token, plan)
        parts = sorted(self.parts, key=lambda part: not part.on_host)
        trees = [part.propose(token, plan) for part in parts]
        return best_chains(trees) if plan.chain or self.width == 1 else merge(trees)

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Any, Children]:
        starts = [part.start(row, path) if part.on_host else (None, lambda _: ()) for part in self.parts]
        below = [children for _, children in starts]
        reliabilities = [came / given for came, given in self._borne_out]
        if not path:
            best = [max(children(state), key=lambda child: child[1], default=None) for state, children in starts]
            self._expected[row] = [None if child is None else child[:2] for child in best]

        def joined(states: Sequence[Any]) -> Iterable[tuple[int, float, Any]]:
            odds: dict[int, float] = {}
            following: dict[int, list[Any]] = {}
            for place, (state, children) in enumerate(zip(states, below, strict=True)):
                for token, share, after in () if state is None else children(state):
                    share = min(share * reliabilities[place], _MOST)
                    odds[token] = odds.get(token, 0.0) + share / (1.0 - share)
                    following.setdefault(token, [None] * len(states))[place] = after
            total = 1.0 + sum(odds.values())
            return [(token, odds[token] / total, after) for token, after in following.items()]

        return [state for state, _ in starts], joined

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        for part in self.parts:
            part.observe(tree, verdict, output)
        for row, expected in self._expected.items():
            path, tokens = verdict.host[row]
            for counts, guess in zip(self._borne_out, expected, strict=True):
                if path and guess is not None:
                    counts[:] = counts[0] * _STEPS_DECAY + (guess[0] == tokens[0]), counts[1] * _STEPS_DECAY + guess[1]
        self._expected = {}


_ESCAPE = 0.5  # weight of all shorter contexts relative to one occurrence of a context


def mixed(contexts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    """Next-token probabilities from counts per context, by prediction by partial matching (PPM).

    Args:
        contexts: next-token counts of each context, longest context first.
    """
    probs: dict[int, float] = {}
    weight = 1.0
    for counts in contexts:
        total = sum(counts.values()) + _ESCAPE
        for token, count in counts.items():
            probs[token] = probs.get(token, 0.0) + weight * count / total
        weight *= _ESCAPE / total
    return probs
