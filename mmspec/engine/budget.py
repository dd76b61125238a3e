"""Tree budgets: number of drafted nodes per step.

A tree of n drafted nodes with path probabilities g_1 >= g_2 >= ... emits ``1 + sum(g_1..g_n)`` expected tokens in
``t(n + 1)`` seconds. t is measured (``mmspec.engine.calibrate``); the probabilities are the drafter's, calibrated
by observed acceptance. Plain decoding, a tree of the root alone, is always a candidate.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from math import log2
from statistics import median_low
from typing import TYPE_CHECKING

from mmspec.core.budget import CostTable
from mmspec.core.trial import Trial
from mmspec.engine.drift import Drift, MeasuredBudget
from mmspec.engine.line import Line

if TYPE_CHECKING:
    from mmspec.core.tree import TokenTree

_BINS = 16
_PRIOR = 6.0  # pseudo-observations per bin that agree with the drafter
_DECAY = 0.995  # decay of a bin's observations, per observation
_FADE = 0.95  # decay of recent tokens and seconds, per step
_FIRST = 2  # plain steps before the first draft
_PLAIN = 5  # last plain steps whose time counts
_AGAIN = 100  # draft steps before another plain one


class AdaptiveBudget(MeasuredBudget):
    """Adaptive tree size: maximises expected tokens minus verify time at the recent decoding rate.

    Learned estimates (acceptance by confidence, draft cost) persist between requests and batch sizes. Once recent draft
    steps have taken more time per token than plain steps, by the clock and by more than chance, drafting rests
    (``Trial``): plain steps are measured anew, then draft steps, so that a busy machine slows both. Time is in plain
    steps of the batch, tokens are per row.

    Args:
        cost: verify time of the target.
        nodes: maximum tree size.
        depth: as for ``Budget``.
        batch: batch size.
    """

    adapts = True

    def __init__(self, cost: CostTable, nodes: int = 64, depth: int = 16, batch: int = 1) -> None:
        super().__init__(nodes, depth)
        self.limit = nodes
        self._table, self.drift = cost, Drift()
        self._costs: dict[int, list[float]] = {}  # by batch size: calibrated seconds of a pass over n nodes per row
        self._batch = 0  # largest batch since drafting was last tried anew
        self._rows = 1  # of the step
        self._beyond = Line(least=-0.5)  # time of pass and commit beyond calibration, by draft tokens per row
        self._drafting = Line()  # draft time by tree levels, after a step that also drafted
        self._drafted = False  # whether the last step did
        self._tokens, self._time = 1.0, 1.0  # recent tokens and time
        self._accepted = [0.0] * _BINS
        self._seen = [0.0] * _BINS
        self._shown: list[list[float]] = []
        self._usual = 8.0
        self._trial = Trial()  # draft steps against plain steps
        self._plain: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=_PLAIN))  # times by bits of the batch
        self._since = 0  # draft steps since the last plain one
        self.resize(batch)

    def resize(self, batch: int) -> None:
        if batch != self._rows:
            self._rows = batch
            self._beyond.interrupt()
            self._drafting.interrupt()
        if batch not in self._costs:
            widths = (batch * self._table.width(n, batch) for n in range(1, self.limit + 2))
            self._costs[batch] = [self._table(width) for width in widths]
        self._cost = self._costs[batch]
        if 2 * batch <= self._batch:  # drafting may pay off again with fewer rows
            self._trial.restart()
        if 2 * batch <= self._batch or batch > self._batch:
            self._batch = batch

    def begin(self, share: float = 1.0) -> None:
        self._trial.rest = int(self._trial.rest * (1.0 - share))

    def drafts(self) -> bool:
        self.levels = 1
        measured = len(self._plain[self._rows.bit_length()]) >= _FIRST and self._since < _AGAIN
        return measured and not self._trial.rests() and super().drafts()

    @property
    def least_gain(self) -> float:
        return self._drafting.slope * self._tokens / self._time

    def prune(self, tree: TokenTree) -> TokenTree:
        return tree.first(1 + self.take(tree.path_probs)) if tree.prunable else tree

    def take(self, gains: Sequence[Sequence[float]]) -> int:
        """Most profitable number of drafted nodes per row, given path probabilities in descending order."""
        widest = min(self.nodes, max(map(len, gains), default=0))
        corrected = [[self._correct(g) for g in row[:widest]] for row in gains]
        price = self._tokens / self._time
        best, profit, best_profit = 0, 0.0, 0.0
        for n in range(1, widest + 1):
            profit += sum(row[n - 1] for row in corrected if len(row) >= n) / len(gains)
            if profit - price * self._extra(n) > best_profit:
                best, best_profit = n, profit - price * self._extra(n)
        self._shown = [list(row[:best]) for row in gains]
        # Candidates cost draft time: request only somewhat more than was used lately.
        self._usual += 0.2 * (best - self._usual)
        self.nodes = min(self.limit, 3 + int(1.5 * self._usual))
        return best

    def observe(
        self,
        nodes: int,
        paths: list[list[int]],
        draft_seconds: float,
        verify_seconds: float,
        commit_seconds: float = 0.0,
    ) -> None:
        drafts = min(nodes, len(self._cost)) - 1
        if self.drift:
            self.drift.add(verify_seconds, self._cost[drafts])
        rest = verify_seconds + commit_seconds
        self._beyond.add(drafts, rest / self._cost[0], self._cost[drafts] / self._cost[0])
        spent = 1.0 + self._extra(drafts)
        if draft_seconds > 0:
            # By the clock of the same step's verify pass: a busy machine slows both.
            drafted = draft_seconds / rest * spent
            if self._drafted:
                self._drafting.add(self.levels, drafted, guess=drafted / (1 + self.levels))
            spent += drafted
        self._drafted = draft_seconds > 0
        emitted = sum(map(len, paths)) / max(sum(map(bool, paths)), 1)
        time, plain = (draft_seconds + rest) / self._cost[0], self._plain[self._rows.bit_length()]
        if draft_seconds == 0:
            plain.append(time)
            self._since = 0
        elif plain:  # grammars force tokens in first steps, too
            self._trial.add(emitted - time / median_low(plain))
            self._since += 1
        self._tokens = _FADE * self._tokens + emitted
        self._time = _FADE * self._time + spent
        for row, path in zip(self._shown, paths, strict=False):
            if not path:
                continue  # a finished row
            kept = set(path)
            for i, gain in enumerate(row, start=1):
                b = _bin(gain)
                self._seen[b] = self._seen[b] * _DECAY + 1.0
                self._accepted[b] = self._accepted[b] * _DECAY + (i in kept)
        self._shown = []

    def _extra(self, nodes: int) -> float:
        """Cost of a tree of ``nodes`` drafted nodes beyond plain decoding."""
        beyond = self._cost[nodes] / self._cost[0] - 1.0 + self._beyond.slope * nodes
        return beyond / (1.0 + self._beyond.fixed)

    def _correct(self, gain: float) -> float:
        """Calibrated acceptance probability of a node with path probability ``gain``."""
        b = _bin(gain)
        return (self._accepted[b] + _PRIOR * gain) / (self._seen[b] + _PRIOR)


def _bin(gain: float) -> int:
    """Bin of a probability, by half octaves: 1, 0.7, 0.5, 0.35, ..."""
    return min(int(-2.0 * log2(gain)), _BINS - 1) if gain > 0.0 else _BINS - 1
