"""Tree budgets: number of drafted nodes per step, measured cost of a verify pass, and drafting payoff."""

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
        chain: draft chains, one child per node.

    Attributes:
        remaining: (set by the engine) drafts that the longest unfinished row can still accept.
        floor: minimum path probability of a candidate.
        least_gain: minimum expected tokens per row that another tree level must add.
        levels: (set by drafters that draft level by level) levels of the step's tree.
    """

    floor = 0.002
    levels = 1
    adapts = False  # whether sizes depend on measured times

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
        """The tree, or its best chain if drafts are chains and it can be pruned; root-only if no draft is left."""
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
        """Update with a step's tree size (including the root), accepted path per row, and times.

        Args:
            shape: value of ``self.shape`` when the tree was drafted.
        """

    @property
    def shape(self) -> Hashable:
        """Shape of the requested drafts."""
        return None


_RECENT_STEPS = 32  # window of the mean gain
_FEWEST_STEPS = 12  # minimum steps for the significance test of a loss
_STAKE = 3.0  # maximum total loss in fewer steps
_HOPE = 1.0  # prior: the gain of one additional step
_REST = 28, 84  # minimum and maximum cooldown, in steps
_STANDARD_ERRORS = 2.0  # threshold of a significant mean loss
_LOSS_SHARE = 0.03  # maximum share of time lost to draft steps between cooldowns


class DraftingPayoff:
    """Decides whether drafting pays: drafting pauses for a cooldown after a significant loss, then is tried again.

    The gain of a draft step is its tokens minus its time, both in units of plain decode steps or of tokens. A mean gain
    of recent steps that is significantly below zero starts a cooldown, which is longer for larger losses.
    """

    def __init__(self) -> None:
        self._gains: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.rest = 0

    def rests(self) -> bool:
        """Whether drafting is paused in this step; called once per step."""
        if not self.rest and self._loses():
            fewest, most = _REST
            self.rest = min(max(fewest, int(_FEWEST_STEPS * -fmean(self._gains) / _LOSS_SHARE)), most)
            self._gains.clear()
        if not self.rest:
            return False
        self.rest -= 1
        return True

    def add(self, gain: float) -> None:
        """Add a draft step; the loss of a single slow step is limited."""
        self._gains.append(max(gain, 1 - _STAKE))

    def restart(self) -> None:
        """Reset all statistics."""
        self._gains.clear()
        self.rest = 0

    def _loses(self) -> bool:
        if len(self._gains) < _FEWEST_STEPS:
            return sum(self._gains) < -_STAKE
        count = len(self._gains) + 1  # including the prior; statistics.stdev would be a hundred times slower
        mean = (sum(self._gains) + _HOPE) / count
        variance = (sum(map(mul, self._gains, self._gains)) + _HOPE**2) / count - mean**2
        return mean + _STANDARD_ERRORS * sqrt(max(variance, 0.0) / (count - 1)) < 0.0
