"""Interface of tree budgets: the number of drafted nodes per step, the measured cost of a verify pass, and whether
drafting pays."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from operator import mul
from statistics import fmean

from mmspec.core.tree import TokenTree
from mmspec.ops import kernels


@dataclass(frozen=True)
class CostTable:
    """Measured time of a verify pass by its total number of tokens.

    Attributes:
        tokens: measured sizes, ascending from 1.
        seconds: time of a pass of each size.

    Raises:
        ValueError: fewer than two sizes, sizes that do not ascend from 1, or a time that is not positive.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = len(self.tokens) > 1 and self.tokens[0] == 1 and all(a < b for a, b in pairwise(self.tokens))
        if not ascending or len(self.seconds) != len(self.tokens):
            raise ValueError(f"sizes must ascend from 1, with a time each: got {self.tokens} and {self.seconds}")
        if not all(0 < seconds < inf for seconds in self.seconds):
            raise ValueError(f"times must be positive: got {self.seconds}")

    def __call__(self, count: int) -> float:
        """Seconds for ``count`` tokens, by linear interpolation and extrapolation."""
        at = min(max(bisect_left(self.tokens, count), 1), len(self.tokens) - 1)
        low, high = self.tokens[at - 1], self.tokens[at]
        share = (count - low) / (high - low)
        return self.seconds[at - 1] + share * (self.seconds[at] - self.seconds[at - 1])

    def width(self, nodes: int, batch: int = 1) -> int:
        """Padded number of nodes, at least ``nodes``, with the fastest pass.

        More tokens can be faster: CPU GEMMs of one or a few rows use slower kernels than those of eight.
        """
        best = nodes
        for count in self.tokens:
            wider = count // batch
            if wider > best and self(wider * batch) < 0.97 * self(best * batch):
                best = wider
        return best


class Budget:
    """Fixed number of drafted nodes per step; base class of budgets.

    Args:
        nodes: maximum drafted nodes per row and step.
        depth: maximum tree depth.
        chain: drafts are chains, one child per node.

    Attributes:
        remaining: (set by the engine) drafts that the longest unfinished row can still accept.
        floor: minimum path probability of a candidate.
        least_gain: a tree gets another level while that adds more expected tokens per row.
        levels: (set by drafters that draft level by level) levels of the step's tree.
    """

    floor = 0.002
    levels = 1
    adapts = False  # whether sizes follow the clock

    def __init__(self, nodes: int = 16, depth: int = 12, chain: bool = False) -> None:
        self.nodes = nodes
        self.depth = depth
        self.chain = chain
        self.remaining = depth

    def resize(self, batch: int) -> None:
        """Set the batch size of the next step."""

    def begin(self, share: float = 1.0) -> None:
        """Start new requests, which make up ``share`` of the batch."""

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.remaining)

    def drafts(self) -> bool:
        """Whether to draft at all in this step."""
        return self.remaining > 0 and self.nodes > 0

    @property
    def least_gain(self) -> float:
        return 0.0

    def prune(self, tree: TokenTree) -> TokenTree:
        """Prune a tree to its most probable nodes; drawn trees and those without ``log_probs`` are kept whole."""
        tree = self.shaped(tree)
        return tree.first(1 + self.nodes) if tree.prunable else tree

    def shaped(self, tree: TokenTree) -> TokenTree:
        """A tree, or its best chain if drafts are chains and it can be pruned: a root where no draft is left."""
        chain = self.chain and tree.prunable and not kernels.static_shapes(tree.tokens.device)
        return tree.best_chain() if chain else tree

    def observe(
        self,
        nodes: int,
        paths: list[list[int]],
        draft_seconds: float,
        verify_seconds: float,
        commit_seconds: float = 0.0,
        shape: Hashable = None,
    ) -> None:
        """Update with a step's tree size (root included), accepted path per row, and times.

        Args:
            shape: ``shape`` as it was when the tree was drafted.
        """

    @property
    def shape(self) -> Hashable:
        """Of the drafts that it asks for."""
        return None


_RECENT_STEPS = 32  # whose gain is averaged
_FEWEST_STEPS = 12  # that may show a loss
_STAKE = 3.0  # what fewer may lose
_HOPE = 1.0  # gain of another step: some drafts are accepted, although none were
_REST = 28, 84  # fewest and most steps of a rest
_STANDARD_ERRORS = 2.0  # that a mean loss must exceed
_LOSS_SHARE = 0.03  # of the time, which the steps between rests may lose


class DraftingPayoff:
    """Whether drafting pays: it is tried, rests after losses beyond chance, and is tried anew.

    Each draft step gains its tokens and loses its time, both in plain decode steps or both in tokens. While the mean
    gain of recent steps is below zero by more than chance, drafting rests, the longer the more it loses.
    """

    def __init__(self) -> None:
        self._gains: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.rest = 0

    def rests(self) -> bool:
        """Whether to rest in this step; called once per step."""
        if not self.rest and self._loses():
            fewest, most = _REST
            self.rest = min(max(fewest, int(_FEWEST_STEPS * -fmean(self._gains) / _LOSS_SHARE)), most)
            self._gains.clear()
        if not self.rest:
            return False
        self.rest -= 1
        return True

    def add(self, gain: float) -> None:
        """Add a draft step; the loss of a very slow one is limited."""
        self._gains.append(max(gain, 1 - _STAKE))

    def restart(self) -> None:
        """Forget all steps."""
        self._gains.clear()
        self.rest = 0

    def _loses(self) -> bool:
        if len(self._gains) < _FEWEST_STEPS:
            return sum(self._gains) < -_STAKE
        count = len(self._gains) + 1  # and the hope; statistics.stdev takes a hundred times as long, in every step
        mean = (sum(self._gains) + _HOPE) / count
        variance = (sum(map(mul, self._gains, self._gains)) + _HOPE**2) / count - mean**2
        return mean + _STANDARD_ERRORS * sqrt(max(variance, 0.0) / (count - 1)) < 0.0
