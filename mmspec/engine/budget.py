"""Tree budgets: number of drafted nodes per step.

A tree of n drafted nodes with path probabilities g_1 >= g_2 >= ... emits ``1 + sum(g_1..g_n)`` expected tokens in
``t(n + 1)`` seconds. t is measured (``mmspec.engine.calibrate``); the probabilities are the drafter's, calibrated
by observed acceptance. Plain decoding, a tree of the root alone, is always a candidate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import log2
from statistics import fmean, median
from typing import TYPE_CHECKING

from mmspec.core.budget import CostTable
from mmspec.engine.drift import Drift, MeasuredBudget

if TYPE_CHECKING:
    from mmspec.core.tree import TokenTree

_BINS = 16
_PRIOR = 6.0  # pseudo-observations per bin that agree with the drafter
_DECAY = 0.995  # decay of a bin's observations, per observation
_FADE = 0.95  # decay of recent tokens and seconds, per step
_DISCOUNT = 0.7  # discount on verify cost: look-up drafters also learn from rejected nodes
_TRIAL = 3.0  # initial estimate of plain steps saved per request
_PATIENCE = 12  # unprofitable draft steps, after which drafting is only probed:
_TRY, _EVERY = 4, 32  # consecutive steps out of a cycle; the first one also catches up on those skipped
_LATELY = 32  # draft steps whose tokens are averaged before they are compared by the clock
_DRAFT = 0.2  # initial draft cost, in plain steps
_TRY_AGAIN = 64  # steps between probes of another size; tokens that earn a draft, however much was lost
_CREDIT = 0.25  # plain steps that drafting may lose initially
_CREDIT_PER_TOKEN = 0.005  # additional credit per emitted token


class AdaptiveBudget(MeasuredBudget):
    """Adaptive tree size: maximises expected tokens minus verify time at the recent decoding rate.

    Learned estimates (acceptance by confidence, draft cost) persist between requests and batch sizes. Each request has
    an account of the time saved against plain decoding. Drafting may spend what it saved, a small credit, the cost of
    one draft, and half of the savings of earlier requests, which bounds the loss on unpredictable text. While recent
    draft steps took more time per token than plain steps, by the clock, drafting is only probed. Both are then measured
    anew, one after the other, so that a busy machine slows both. Time is in plain steps of the batch, tokens are per
    row.

    Args:
        cost: verify time of the target.
        nodes: maximum tree size.
        depth: as for ``Budget``.
        batch: batch size.
    """

    def __init__(self, cost: CostTable, nodes: int = 64, depth: int = 16, batch: int = 1) -> None:
        super().__init__(nodes, depth)
        self.limit = nodes
        self._table, self.drift = cost, Drift()
        self._costs: dict[int, list[float]] = {}  # by batch size: calibrated seconds of a pass over n nodes per row
        self._batch = 0  # batch size at the last credit
        self._draft = _DRAFT  # draft cost per step, after a step that also drafted
        self._drafted = self._timed = False  # whether the last step drafted; whether draft cost was measured
        self._levels, self._level = 1, 0.0  # tree levels of this step, cost per level
        self._tokens, self._time = 1.0, 1.0  # recent tokens and time
        self._accepted = [0.0] * _BINS
        self._seen = [0.0] * _BINS
        self._shown: list[list[float]] = []
        self._usual = 8.0
        self._account = 0.0
        self._in_vain = 0  # consecutive unprofitable draft steps
        self._saved, self._record = 0.0, _TRIAL  # time saved in this request, moving average per request
        self._pause = 0  # steps until the next probe
        self._emitted: deque[float] = deque(maxlen=_LATELY)  # tokens of draft steps
        self._times: deque[float] = deque(maxlen=_PATIENCE)  # times of draft steps since the last pause
        self._plain: deque[float] = deque(maxlen=_PATIENCE)  # times of plain steps
        self.resize(batch)

    def resize(self, batch: int) -> None:
        if batch not in self._costs:
            widths = (batch * self._table.width(n, batch) for n in range(1, self.limit + 2))
            self._costs[batch] = [self._table(width) for width in widths]
        self._cost = self._costs[batch]
        if 2 * batch <= self._batch:  # drafting may pay off again with fewer rows
            self._in_vain, self._pause, self._account = 0, 0, max(self._account, self._credit)
            self._emitted.clear()
            self._times.clear()
        if 2 * batch <= self._batch or batch > self._batch:
            self._batch = batch

    @property
    def _credit(self) -> float:
        """Initial account of a request; it always covers one draft, as a slow one would otherwise be the last."""
        return _CREDIT + max(_CREDIT, 0.5 * self._record) + self._draft

    def begin(self, share: float = 1.0) -> None:
        if self._saved:
            self._record += 0.3 * share * (self._saved - self._record)
        self._saved *= 1.0 - share
        self._account += share * (self._credit - self._account)

    def drafts(self) -> bool:
        self._levels = 1
        if not self._pause and len(self._times) >= _TRY and (self._in_vain >= _PATIENCE or self._loses()):
            self._pause = _EVERY - _TRY
            self._times.clear()
        if self._pause:
            self._pause -= 1
            return False
        return super().drafts() and self._account > self._least

    def _loses(self) -> bool:
        """Whether draft steps took more time per token than plain steps; outliers are clipped."""
        if len(self._emitted) < _LATELY or not self._plain:  # a drafter that starts untrained has yet to learn
            return False
        limit = 2 * median(self._times)
        return median(self._plain) * fmean(self._emitted) < fmean(min(time, limit) for time in self._times)

    def deeper(self, gain: float) -> bool:
        pays = gain * self._time / self._tokens > self._level
        self._levels += pays
        return pays

    def prune(self, tree: TokenTree) -> TokenTree:
        return tree.first(1 + self.take(tree.path_probs)) if tree.prunable else tree

    def take(self, gains: Sequence[Sequence[float]]) -> int:
        """Most profitable number of drafted nodes per row, given path probabilities in descending order."""
        widest = min(self.nodes, max(map(len, gains), default=0))
        corrected = [[self._correct(g) for g in row[:widest]] for row in gains]
        price = _DISCOUNT * self._tokens / self._time
        best, profit, best_profit = 0, 0.0, 0.0
        for n in range(1, widest + 1):
            if self._extra(n) + self._draft > self._account:
                break
            profit += sum(row[n - 1] for row in corrected if len(row) >= n) / len(gains)
            if profit - price * self._extra(n) > best_profit:
                best, best_profit = n, profit - price * self._extra(n)
        self._shown = [list(row[:best]) for row in gains]
        # Candidates cost draft time: request only somewhat more than was used lately.
        self._usual += 0.2 * (best - self._usual)
        self.nodes = min(self.limit, 8 + int(2 * self._usual))
        return best

    def observe(
        self,
        nodes: int,
        paths: list[list[int]],
        draft_seconds: float,
        verify_seconds: float,
        commit_seconds: float = 0.0,
    ) -> None:
        calibrated = self._cost[min(nodes, len(self._cost)) - 1]
        if self.drift:
            self.drift.add(verify_seconds, calibrated)
        spent = 1.0 + self._extra(min(nodes, len(self._cost)) - 1)
        if draft_seconds > 0:
            # By the clock of the same step's verify pass: a busy machine slows both.
            drafted = draft_seconds / verify_seconds * spent
            if self._timed:
                drafted = min(drafted, 3 * self._draft)
            if self._drafted:
                self._draft += (0.2 if self._timed else 1.0) * (drafted - self._draft)
                self._level, self._timed = self._draft / self._levels, True
            spent += drafted
        self._drafted = draft_seconds > 0
        emitted = sum(map(len, paths)) / max(sum(map(bool, paths)), 1)
        time = (draft_seconds + verify_seconds + commit_seconds) / self._cost[0]
        if draft_seconds > 0:
            self._emitted.append(emitted)
            self._times.append(time)
        else:
            self._plain.append(time)
        self._tokens = _FADE * self._tokens + emitted
        self._time = _FADE * self._time + spent
        self._saved += emitted - spent
        if draft_seconds > 0:
            self._in_vain = 0 if emitted > spent else self._in_vain + 1
        self._account += emitted * (1 + _CREDIT_PER_TOKEN) - spent
        # Another draft is tried after some tokens, whatever the last ones took.
        self._account = max(self._account, self._least - _TRY_AGAIN * _CREDIT_PER_TOKEN)
        for row, path in zip(self._shown, paths, strict=False):
            if not path:
                continue  # a finished row
            kept = set(path)
            for i, gain in enumerate(row, start=1):
                b = _bin(gain)
                self._seen[b] = self._seen[b] * _DECAY + 1.0
                self._accepted[b] = self._accepted[b] * _DECAY + (i in kept)
        self._shown = []

    @property
    def _least(self) -> float:
        """Cost of the smallest draft step beyond plain decoding."""
        return self._extra(min(1, self.limit)) + self._draft

    def _extra(self, nodes: int) -> float:
        """Cost of a tree of ``nodes`` drafted nodes beyond plain decoding."""
        return self._cost[nodes] / self._cost[0] - 1.0

    def _correct(self, gain: float) -> float:
        """Calibrated acceptance probability of a node with path probability ``gain``."""
        b = _bin(gain)
        return (self._accepted[b] + _PRIOR * gain) / (self._seen[b] + _PRIOR)


def _bin(gain: float) -> int:
    """Bin of a probability, by half octaves: 1, 0.7, 0.5, 0.35, ..."""
    return min(int(-2.0 * log2(gain)), _BINS - 1) if gain > 0.0 else _BINS - 1
