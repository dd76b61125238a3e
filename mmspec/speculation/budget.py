"""How large a tree pays, step by step.

A tree of n drafted nodes with path probabilities g_1 >= g_2 >= ... is expected to emit ``1 + sum(g_1..g_n)`` tokens in
``t(n + 1)`` seconds. t is measured (``mmspec.speculation.calibrate``), the probabilities are the drafter's own,
corrected by how often nodes of such a probability were accepted so far. A tree of the root alone is plain decoding, and
always a candidate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmspec.speculation.tree import TokenTree

_BINS = 16
_PRIOR = 6.0  # an untried bin counts as this many observations that agree with the drafter
_DECAY = 0.995  # of what a bin has seen, per observation
_FADE = 0.95  # of tokens and seconds of late, per step
_THRIFT = 0.7  # time is priced below its worth: a look-up drafter also learns from the nodes that a tree shows it
_TRIAL = 3.0  # plain steps that a drafter is taken to save per request before any was seen
_PATIENCE = 12  # steps drafted in vain, after which drafting is only tried now and then:
_TRY, _EVERY = 4, 32  # so many steps in a row out of so many, since the first one also makes up for those before
_DRAFT = 0.2  # of a plain step: what drafting is taken to cost before it was seen
_GUESS = 0.6  # that the likeliest node is accepted, before any was seen
_DECAY_RANK = 0.98  # of how often a rank was accepted, per step
_TRY_AGAIN = 64  # steps until another size is tried
_RATE = 0.05  # weight of the latest verify time
_RIDGE = 0.1  # variance of sizes, in plain steps squared, below which their times do not tell much
_LEAST = 0.2  # of a verify time: what its part that grows with the tree is taken for at least
_CREDIT = 0.25  # plain steps that drafting may lose before it has won any
_CREDIT_PER_TOKEN = 0.005  # and more for every token emitted


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of a verify pass over n tokens of a batch in all.

    Attributes:
        tokens: sizes measured, ascending, the first being 1.
        seconds: the pass's time at each size.

    Raises:
        ValueError: fewer than two sizes, sizes that do not ascend from 1, or a size without a positive time.
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
        """Seconds for ``count`` tokens, linear between the measured sizes and beyond the last."""
        at = min(max(bisect_left(self.tokens, count), 1), len(self.tokens) - 1)
        low, high = self.tokens[at - 1], self.tokens[at]
        share = (count - low) / (high - low)
        return self.seconds[at - 1] + share * (self.seconds[at] - self.seconds[at - 1])

    def width(self, nodes: int, batch: int = 1) -> int:
        """The number of nodes, at least ``nodes``, at which a pass is cheapest.

        More tokens can cost less: on a CPU, matrix products of one or of a few rows take slower paths than of eight.
        """
        best = nodes
        for count in self.tokens:
            wider = count // batch
            if wider > best and self(wider * batch) < 0.97 * self(best * batch):
                best = wider
        return best


class Budget:
    """A fixed number of drafted nodes per step; the base of every budget.

    Args:
        nodes: drafted nodes per row and step at most.
        depth: tokens that one step may draft in sequence at most.

    Attributes:
        remaining: (set by the engine) drafts that the longest unfinished row can still use.
        floor: path probability below which a node is not worth listing as a candidate.
    """

    floor = 0.002

    def __init__(self, nodes: int = 16, depth: int = 12) -> None:
        self.nodes = nodes
        self.depth = depth
        self.remaining = depth

    def resize(self, batch: int) -> None:
        """Set the number of rows of the next step."""

    def begin(self, share: float = 1.0) -> None:
        """Requests have joined, which make up this share of the batch."""

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.remaining)

    def drafts(self) -> bool:
        """Whether to draft at all in this step."""
        return self.remaining > 0 and self.nodes > 0

    def deeper(self, gain: float) -> bool:
        """Whether one more level of the tree pays, which is expected to add ``gain`` tokens per row to this step."""
        return True

    def prune(self, tree: TokenTree) -> TokenTree:
        """The part of a proposed tree that this step verifies: its likeliest nodes, as many as pay. Drawn trees stay
        whole, and so do those without ``log_probs``."""
        return tree.first(1 + self.nodes) if tree.prunable else tree

    def observe(self, nodes: int, paths: list[list[int]], draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a step: tree size with root, accepted path of each row, and what drafting and verifying took."""


class AdaptiveBudget(Budget):
    """The tree size that earns most: tokens gained, less the time they cost at what time has been worth of late.

    What it learns (which confidences hold, what drafting costs) outlives requests, and serves batches of every size.
    Each request has an account of the time saved against plain decoding: drafting may use up what it saved, a small
    credit, the cost of one draft, and half of what it saved in earlier requests, so that a text that no drafter can
    guess costs next to nothing. Time is counted in plain steps of the batch, tokens per row.

    Args:
        cost: the target's verify time.
        nodes: largest tree size to choose.
        depth: as for ``Budget``.
        batch: rows of the batch.
    """

    def __init__(self, cost: CostTable, nodes: int = 64, depth: int = 16, batch: int = 1) -> None:
        super().__init__(nodes, depth)
        self.limit = nodes
        self._table = cost
        self._costs: dict[int, list[float]] = {}  # by batch size: calibrated seconds of a pass over n nodes per row
        self._batch = 0  # rows for which drafting was last given new credit
        # The line from calibrated to measured time: machines slow down, and the prefix adds to passes of every size.
        self._slope, self._offset = 1.0, 0.0
        self._moments = [1.0, 1.0, 1.0, 1.0]  # of late: means of x, y, x * x and x * y
        self._draft = _DRAFT  # cost of drafting per step, where the step before has drafted, too
        self._drafted = self._timed = False  # whether the last step has drafted; whether that cost was measured
        self._levels, self._level = 1, 0.0  # levels of this step's tree, cost of one
        self._tokens, self._time = 1.0, 1.0  # of late: their ratio is what time is worth
        self._accepted = [0.0] * _BINS
        self._seen = [0.0] * _BINS
        self._shown: list[list[float]] = []
        self._usual = 8.0
        self._account = 0.0
        self._steps = self._in_vain = 0  # steps in all; latest ones whose drafting did not pay
        self._saved, self._record = 0.0, _TRIAL  # time saved in this request, and lately per request
        self.resize(batch)

    def resize(self, batch: int) -> None:
        if batch not in self._costs:
            widths = (batch * self._table.width(n, batch) for n in range(1, self.limit + 2))
            self._costs[batch] = [self._table(width) for width in widths]
        self._cost = self._costs[batch]
        if 2 * batch <= self._batch:  # what did not pay for many rows may pay for few
            self._in_vain, self._account = 0, max(self._account, self._credit)
        if 2 * batch <= self._batch or batch > self._batch:
            self._batch = batch

    @property
    def _credit(self) -> float:
        """What the account of a new request holds: one draft can always be paid, or a slow one would be the last."""
        return _CREDIT + max(_CREDIT, 0.5 * self._record) + self._draft

    def begin(self, share: float = 1.0) -> None:
        if self._saved:
            self._record += 0.3 * share * (self._saved - self._record)
        self._saved *= 1.0 - share
        self._account += share * (self._credit - self._account)

    def drafts(self) -> bool:
        self._levels = 1
        self._steps += 1
        if self._in_vain >= _PATIENCE and self._steps % _EVERY >= _TRY:
            return False
        return super().drafts() and self._account > self._extra(1) + self._draft

    def deeper(self, gain: float) -> bool:
        pays = gain * self._time / self._tokens > self._level
        self._levels += pays
        return pays

    def prune(self, tree: TokenTree) -> TokenTree:
        return tree.first(1 + self.take(tree.path_probs)) if tree.prunable else tree

    def take(self, gains: Sequence[Sequence[float]]) -> int:
        """How many drafted nodes per row pay, given each row's path probabilities in descending order."""
        widest = min(self.nodes, max(map(len, gains), default=0))
        corrected = [[self._correct(g) for g in row[:widest]] for row in gains]
        price = _THRIFT * self._tokens / self._time
        best, profit, best_profit = 0, 0.0, 0.0
        for n in range(1, widest + 1):
            if self._extra(n) + self._draft > self._account:
                break
            profit += sum(row[n - 1] for row in corrected if len(row) >= n) / len(gains)
            if profit - price * self._extra(n) > best_profit:
                best, best_profit = n, profit - price * self._extra(n)
        self._shown = [list(row[:best]) for row in gains]
        # Listing candidates costs time too: look only somewhat further than what paid lately.
        self._usual += 0.2 * (best - self._usual)
        self.nodes = min(self.limit, 8 + int(2 * self._usual))
        return best

    def observe(self, nodes: int, paths: list[list[int]], draft_seconds: float, verify_seconds: float) -> None:
        self._measure(self._cost[min(nodes, len(self._cost)) - 1] / self._cost[0], verify_seconds / self._cost[0])
        spent = 1.0 + self._extra(min(nodes, len(self._cost)) - 1)
        if draft_seconds > 0:
            drafted = draft_seconds / (self._cost[0] * (self._slope + self._offset))
            if self._timed:
                drafted = min(drafted, 3 * self._draft)
            if self._drafted:
                self._draft += (0.2 if self._timed else 1.0) * (drafted - self._draft)
                self._level, self._timed = self._draft / self._levels, True
            spent += drafted
        self._drafted = draft_seconds > 0
        emitted = sum(map(len, paths)) / max(sum(map(bool, paths)), 1)
        self._tokens = _FADE * self._tokens + emitted
        self._time = _FADE * self._time + spent
        self._saved += emitted - spent
        if draft_seconds > 0:
            self._in_vain = 0 if emitted > spent else self._in_vain + 1
        self._account += emitted * (1 + _CREDIT_PER_TOKEN) - spent
        for row, path in zip(self._shown, paths, strict=False):
            if not path:
                continue  # the row has finished, which says nothing about its drafts
            kept = set(path)
            for i, gain in enumerate(row, start=1):
                b = _bin(gain)
                self._seen[b] = self._seen[b] * _DECAY + 1.0
                self._accepted[b] = self._accepted[b] * _DECAY + (i in kept)
        self._shown = []

    def _measure(self, calibrated: float, measured: float) -> None:
        """Fit the line from calibrated to measured time: least squares over the latest passes. Where those were of one
        size, half of what they took longer is taken to grow with the size."""
        expected = self._slope * calibrated + self._offset
        # A hiccup of the machine must not count as the price of a tree.
        measured = min(max(measured, 0.5 * expected), 2.0 * expected)
        latest = (calibrated, measured, calibrated**2, calibrated * measured)
        self._moments = [m + _RATE * (new - m) for m, new in zip(self._moments, latest, strict=True)]
        x, y, xx, xy = self._moments
        usual = 0.5 * (1.0 + y / x)
        slope = (max(xy - x * y, 0.0) + _RIDGE * usual) / (xx - x * x + _RIDGE)
        self._slope = min(max(slope, _LEAST * y / x), y / x / _LEAST)
        self._offset = y - self._slope * x

    def _extra(self, nodes: int) -> float:
        """What a tree of so many drafted nodes costs beyond plain decoding."""
        return self._slope * (self._cost[nodes] / self._cost[0] - 1.0) / (self._slope + self._offset)

    def _correct(self, gain: float) -> float:
        """Probability that a node of path probability ``gain`` is accepted, by what was seen so far."""
        b = _bin(gain)
        return (self._accepted[b] + _PRIOR * gain) / (self._seen[b] + _PRIOR)


class SteadyBudget(Budget):
    """A tree size that is chosen before the tree is drafted, by what earlier trees earned: for devices on which looking
    at a tree's probabilities costs more than verifying it.

    How often the n-th likeliest node of a tree was accepted says what a tree of n nodes emits; what its steps took says
    what that costs, batch size by batch size. Sizes not tried of late are priced by the calibrated passes, and tried
    again now and then.

    Args:
        cost: the target's verify time.
        sizes: drafted nodes to choose among, ascending; plain decoding is always a candidate.
        depth: as for ``Budget``.
        batch: rows of the batch.
    """

    def __init__(
        self, cost: CostTable, sizes: Sequence[int] = (7, 15, 31, 63), depth: int = 12, batch: int = 1
    ) -> None:
        super().__init__(sizes[-1], depth)
        self._table, self._sizes = cost, (0, *sizes)
        self._spent: dict[int, dict[int, float]] = {}  # by batch size and tree size: seconds of a step
        self.resize(batch)
        # The likeliest nodes are those of the first levels; the first steps put this right.
        self._accepted = [_GUESS / rank**0.5 for rank in range(1, sizes[-1] + 1)]
        self._tried = [0] * sizes[-1]
        self._steps = 0

    def resize(self, batch: int) -> None:
        if batch not in self._spent:
            drafting = _DRAFT * self._table(batch)
            self._spent[batch] = {n: self._table(batch * (n + 1)) + drafting * bool(n) for n in self._sizes}
        self._seconds = self._spent[batch]

    def drafts(self) -> bool:
        self._steps += 1
        best = max(self._seconds, key=self._rate)
        if self._steps % _TRY_AGAIN == 0:  # the sizes beside it, in turn
            tried = sorted(self._seconds)
            side = 1 if self._steps % (2 * _TRY_AGAIN) else -1
            best = tried[min(max(tried.index(best) + side, 0), len(tried) - 1)]
        self.nodes = best
        return super().drafts()

    def observe(self, nodes: int, paths: list[list[int]], draft_seconds: float, verify_seconds: float) -> None:
        alive = [set(path) for path in paths if path]
        for rank in range(1, min(nodes, len(self._accepted) + 1)):
            share = sum(rank in path for path in alive) / max(len(alive), 1)
            self._tried[rank - 1] += 1
            weight = max(1 - _DECAY_RANK, 1 / (1 + self._tried[rank - 1]))
            self._accepted[rank - 1] += weight * (share - self._accepted[rank - 1])
        if nodes - 1 in self._seconds:
            spent, usual = draft_seconds + verify_seconds, self._seconds[nodes - 1]
            # A hiccup, or the first step of a size, must not count as its price.
            self._seconds[nodes - 1] += 0.1 * (min(spent, 2 * usual) - usual)

    def _rate(self, size: int) -> float:
        """Tokens per second and row."""
        return (1 + sum(self._accepted[:size])) / self._seconds[size]


def _bin(gain: float) -> int:
    """Half octaves of probability: 1, 0.7, 0.5, 0.35, ..."""
    return min(int(-2.0 * log2(gain)), _BINS - 1) if gain > 0.0 else _BINS - 1
