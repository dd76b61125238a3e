"""Look-up drafters on the host, whose trees are grown best first: alone, or several a tree together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree, best_chains, build_tree, merge
from mmspec.core.verify import Verdict
from mmspec.drafters.growth import best_first

Children = Callable[[Any], Iterable[tuple[int, float, Any]]]


class LookUpDrafter(Drafter):
    """Look-up drafter on the host. Subclasses define ``begin``, which appends to ``rows``, and ``start``.

    Attributes:
        rows: what is known of each row.
        width: maximum children per node; 1 drafts chains, None trees of any width.
        reliability: share of its probabilities that the first tokens are expected to bear out, see ``LookUps``.
    """

    reliability = 0.7

    def __init__(self) -> None:
        self.width: int | None = None
        self.rows: list[Any] = []

    @abstractmethod
    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Any, Children]:
        """The state after a row's tokens and ``path``, and the children of states; see ``best_first``."""

    @property
    def on_host(self) -> bool:
        """Whether it is looked up here, not in a table on a device."""
        return True

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        limits = (budget.max_depth, budget.nodes, budget.floor, 1 if budget.chain else self.width)
        starts = map(self.start, range(len(token)))
        rows = [best_first(state, children, *limits) for state, children in starts]
        return build_tree(token, [row[:2] for row in rows], [row[2] for row in rows])

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        state, children = self.start(row, path)
        return [(token, p) for token, p, _ in children(state)]

    def draft_chains(self, length: int) -> None:
        self.width = 1

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """No-op: the engine extends the history, whose end is looked up."""


_STEPS = 10.0  # that the first reliability counts for
_STEPS_DECAY = 0.98  # of what earlier steps count
_MOST = 0.995  # probability of a token


class LookUps(LookUpDrafter):
    """Several look-up drafters that grow one tree together.

    A token's odds are the sum of those that the drafters give it, each multiplied by the drafter's reliability: how
    often its most probable next token came, in ratio to the probability that it gave. So one that copies with certainty
    leaves no nodes to the guesses of another.

    Args:
        parts: at least two.
    """

    def __init__(self, parts: Sequence[LookUpDrafter]) -> None:
        super().__init__()
        self.parts = parts
        self._borne_out = [[_STEPS * part.reliability, _STEPS] for part in parts]  # tokens, and their probabilities
        self._expected: dict[int, list[tuple[int, float] | None]] = {}  # by row: each part's most probable next token

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

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        if all(part.on_host for part in self.parts):
            return super().propose(token, budget)
        parts = sorted(self.parts, key=lambda part: not part.on_host)
        trees = [part.propose(token, budget) for part in parts]
        return best_chains(trees) if budget.chain or self.width == 1 else merge(trees)

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Any, Children]:
        starts = [part.start(row, path) if part.on_host else (None, _no_children) for part in self.parts]
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


def _no_children(state: None) -> tuple[()]:
    return ()


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
