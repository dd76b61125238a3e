"""Tree budgets: number of drafted nodes per step.

A tree of n drafted nodes with path probabilities g_1 >= g_2 >= ... emits ``1 + sum(g_1..g_n)`` expected tokens in
``t(n + 1)`` seconds. t is measured (``mmspec.engine.calibrate``); the probabilities are the drafter's, calibrated
by observed acceptance. Plain decoding, a tree of the root alone, is always a candidate.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from math import log2
from statistics import median, median_low
from typing import TYPE_CHECKING

from mmspec.core.budget import Budget, CostTable, DraftingPayoff
from mmspec.core.target import Target
from mmspec.engine.calibrate import cost_table, forget_cost, stored_cost
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.targets.transformers_target import sharded

if TYPE_CHECKING:
    from mmspec.core.tree import TokenTree

STEADY_SIZES = (7, 15, 31, 63)
"""Numbers of drafted nodes that ``SteadyBudget`` chooses from."""

_CALIBRATION = threading.Lock()  # two measurements at a time would disturb each other


class Budgets:
    """Budgets of a drafter on a target, and the target's calibration, which the adaptive one needs.

    Args:
        drafts: False decodes plainly.

    Attributes:
        adaptive: the adaptive budget; None before the first step that needs it.
    """

    def __init__(self, target: Target, drafts: bool) -> None:
        self._target, self._drafts = target, drafts
        self.adaptive: MeasuredBudget | None = None
        self._fixed: dict[int | None, Budget] = {}  # by draft tokens per step
        self._searched = False  # for the target's stored cost
        self._refused = False  # the target cannot be calibrated
        self._outdated = False  # passes have proved the calibration wrong

    def calibrate(self, adaptive: bool = True, *, refresh: bool = False) -> None:
        """Load the measured verify times of a target that has no sequences.

        They are measured if ``adaptive`` budgets need them and none are stored, or if passes have proved them wrong.

        Args:
            refresh: measure in any case.
        """
        target = self._target
        if sharded(target):  # ranks that follow their clocks would draft trees of different sizes
            return
        with _CALIBRATION:
            if target.cost is None and not self._searched:
                target.cost, self._searched = stored_cost(target), True
            needed = adaptive and self._drafts and not self._refused and (target.cost is None or self._outdated)
            if not (refresh or needed):
                return
            try:
                target.cost = cost_table(target, refresh=refresh)
            except UserError:  # a model with a short window takes no tree of every size
                self._refused = True
            self.adaptive, self._outdated = None, False

    def of(self, batch: int, num_draft_tokens: int | None) -> Budget:
        """The budget of a step of so many rows: ``num_draft_tokens`` draft tokens, or adaptive if None."""
        cost, fixed = self._target.cost, num_draft_tokens if self._drafts else 0
        if fixed is None and self.adaptive is None and cost is not None:
            steady = kernels.static_shapes(self._target.device)
            self.adaptive = (SteadyBudget if steady else AdaptiveBudget)(cost, batch=batch)
        if fixed is not None or self.adaptive is None:
            return self._fixed.setdefault(fixed, Budget() if fixed is None else Budget(fixed))
        if self.adaptive.check.overestimated and not self._outdated:
            forget_cost(self._target)
            self._outdated = True  # measured again once there are no sequences
        self.adaptive.resize(batch)
        return self.adaptive


_OVERESTIMATE = 1.5  # a calibration that is so many times the time of real passes is wrong
_CHECKED_PASSES = 32  # that show it


class CalibrationCheck:
    """Whether verify passes are far faster than their calibration, which other load disturbed then.

    Passes that are slower show nothing: prefixes grow, and machines are busy.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_CHECKED_PASSES)

    def add(self, seconds: float, calibrated: float) -> None:
        self._ratios.append(seconds / calibrated)

    @property
    def overestimated(self) -> bool:
        return len(self._ratios) == _CHECKED_PASSES and median(self._ratios) * _OVERESTIMATE < 1.0


class MeasuredBudget(Budget):
    """A budget from the measured cost of verify passes.

    Args:
        cost: verify time of the target.

    Attributes:
        check: verify passes against their calibration.
    """

    def __init__(self, cost: CostTable, nodes: int, depth: int) -> None:
        super().__init__(nodes, depth)
        self._table, self.check = cost, CalibrationCheck()


_SLOPE_PRIOR = 2.0  # weight of the slope that is expected
_SLOPE_DECAY = 0.98  # of differences, per difference
_FIXED_WEIGHT = 0.05  # of a step in ``fixed``
_OUTLIER = 1.25  # times the expected time, as which slower steps count: a busy machine shows nothing


class StepTimeModel:
    """Time of a decode step, ``base + fixed + slope * x``, which grows with its tree; ``base`` is known.

    The slope comes from the differences of successive steps, which other load slows alike.

    Args:
        least: of ``fixed``; above the negative of the smallest base.
    """

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self.fixed = self.slope = 0.0
        self._last: tuple[float, float] | None = None
        self._spread = self._common = 0.0
        self._weight = 1.0

    def add(self, x: float, time: float, base: float = 0.0, guess: float = 0.0) -> None:
        """Add a step.

        Args:
            guess: the slope, as far as steps have not shown it.
        """
        if self._weight < 1.0:
            time = min(time, _OUTLIER * (base + self.fixed + self.slope * x))
        y = time - base
        if self._last is not None and (more := x - self._last[0]):
            self._spread = _SLOPE_DECAY * self._spread + more * more
            self._common = _SLOPE_DECAY * self._common + more * (y - self._last[1])
        self.slope = max(self._common + _SLOPE_PRIOR * guess, 0.0) / (self._spread + _SLOPE_PRIOR)
        self._last = x, y
        self.fixed = max(self.fixed + self._weight * (y - self.slope * x - self.fixed), self._least)
        self._weight = max(_FIXED_WEIGHT, self._weight / (1.0 + self._weight))

    def interrupt(self) -> None:
        """The next step differs from the last one by more than ``x``."""
        self._last = None


_BINS = 16  # of path probabilities
_BIN_PRIOR = 6.0  # pseudo-observations per bin that agree with the drafter
_BIN_DECAY = 0.995  # decay of a bin's observations, per observation
_PACE_DECAY = 0.95  # decay of recent tokens and seconds, per step
_FIRST_PLAIN = 2  # plain steps before the first draft
_PLAIN_STEPS = 5  # last plain steps whose time counts
_PLAIN_INTERVAL = 100  # draft steps before another plain one


class AdaptiveBudget(MeasuredBudget):
    """Adaptive tree size: maximises expected tokens minus verify time at the recent decoding rate.

    Learned estimates (acceptance by confidence, draft cost) persist between requests and batch sizes. Once recent draft
    steps have taken more time per token than plain steps, by the clock and by more than chance, drafting rests
    (``DraftingPayoff``): plain steps are measured anew, then draft steps, so that a busy machine slows both. Time is in
    plain steps of the batch, tokens are per row.

    Args:
        cost: as for ``MeasuredBudget``.
        nodes: maximum tree size.
        depth: as for ``Budget``.
        batch: batch size.
    """

    adapts = True

    def __init__(self, cost: CostTable, nodes: int = 64, depth: int = 16, batch: int = 1) -> None:
        super().__init__(cost, nodes, depth)
        self.limit = nodes
        self._costs: dict[int, list[float]] = {}  # by batch size: calibrated seconds of a pass over n nodes per row
        self._batch = 0  # largest batch since drafting was last tried anew
        self._rows = 1  # of the step
        self._beyond = StepTimeModel(least=-0.5)  # time of pass and commit beyond calibration, by draft tokens per row
        self._drafting = StepTimeModel()  # draft time by tree levels, after a step that also drafted
        self._drafted = False  # whether the last step did
        self._tokens, self._time = 1.0, 1.0  # recent tokens and time
        self._accepted = [0.0] * _BINS
        self._seen = [0.0] * _BINS
        self._shown: list[list[float]] = []
        self._usual = 8.0
        self._payoff = DraftingPayoff()  # draft steps against plain steps
        self._plain: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=_PLAIN_STEPS))  # by bits of the batch
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
            self._payoff.restart()
        if 2 * batch <= self._batch or batch > self._batch:
            self._batch = batch

    def begin(self, share: float = 1.0) -> None:
        self._payoff.rest = int(self._payoff.rest * (1.0 - share))

    def drafts(self) -> bool:
        self.levels = 1
        measured = len(self._plain[self._rows.bit_length()]) >= _FIRST_PLAIN and self._since < _PLAIN_INTERVAL
        return measured and not self._payoff.rests() and super().drafts()

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
        self.check.add(verify_seconds, self._cost[drafts])
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
            self._payoff.add(emitted - time / median_low(plain))
            self._since += 1
        self._tokens = _PACE_DECAY * self._tokens + emitted
        self._time = _PACE_DECAY * self._time + spent
        for row, path in zip(self._shown, paths, strict=False):
            if not path:
                continue  # a finished row
            kept = set(path)
            for i, gain in enumerate(row, start=1):
                b = _bin(gain)
                self._seen[b] = self._seen[b] * _BIN_DECAY + 1.0
                self._accepted[b] = self._accepted[b] * _BIN_DECAY + (i in kept)
        self._shown = []

    def _extra(self, nodes: int) -> float:
        """Cost of a tree of ``nodes`` drafted nodes beyond plain decoding."""
        beyond = self._cost[nodes] / self._cost[0] - 1.0 + self._beyond.slope * nodes
        return beyond / (1.0 + self._beyond.fixed)

    def _correct(self, gain: float) -> float:
        """Calibrated acceptance probability of a node with path probability ``gain``."""
        b = _bin(gain)
        return (self._accepted[b] + _BIN_PRIOR * gain) / (self._seen[b] + _BIN_PRIOR)


def _bin(gain: float) -> int:
    """Bin of a probability, by half octaves: 1, 0.7, 0.5, 0.35, ..."""
    return min(int(-2.0 * log2(gain)), _BINS - 1) if gain > 0.0 else _BINS - 1


_PROBE_INTERVAL = 64  # steps between probes of another size
_FIRST_ACCEPTANCE = 0.6  # initial acceptance rate of the most probable node
_RANK_DECAY = 0.98  # decay of acceptance per rank, per step
_FIRST_DRAFT_COST = 0.2  # initial draft cost, in plain steps


class SteadyBudget(MeasuredBudget):
    """Tree size chosen before drafting, without a host sync on the tree's probabilities.

    Expected tokens come from the acceptance rate of each rank (n-th most probable node), costs from measured step times
    by batch size, initialised from the calibration. Other sizes are probed periodically.

    Args:
        cost: as for ``MeasuredBudget``.
        sizes: candidate numbers of drafted nodes, ascending; plain decoding is always a candidate.
        depth: as for ``Budget``.
    """

    def __init__(self, cost: CostTable, sizes: Sequence[int] = STEADY_SIZES, depth: int = 12, batch: int = 1) -> None:
        super().__init__(cost, sizes[-1], depth)
        self._sizes = 0, *sizes
        self._spent: dict[int, dict[int, float]] = {}  # by batch size and tree size: seconds of a step
        self.resize(batch)
        # Initial guess, corrected by the first steps.
        self._accepted = [_FIRST_ACCEPTANCE / rank**0.5 for rank in range(1, sizes[-1] + 1)]
        self._tried = [0] * sizes[-1]
        self._steps = 0

    def resize(self, batch: int) -> None:
        if batch not in self._spent:
            drafting = _FIRST_DRAFT_COST * self._table(batch)
            self._spent[batch] = {n: self._table(batch * (n + 1)) + drafting * bool(n) for n in self._sizes}
        self._seconds, self._batch = self._spent[batch], batch

    def drafts(self) -> bool:
        self._steps += 1
        best = max(self._seconds, key=self._rate)
        if self._steps % _PROBE_INTERVAL == 0:  # measure the next larger and the next smaller size, alternately
            tried = sorted(self._seconds)
            side = 1 if self._steps % (2 * _PROBE_INTERVAL) else -1
            best = tried[min(max(tried.index(best) + side, 0), len(tried) - 1)]
        self.nodes = best
        return super().drafts()

    def observe(
        self,
        nodes: int,
        paths: list[list[int]],
        draft_seconds: float,
        verify_seconds: float,
        commit_seconds: float = 0.0,
    ) -> None:
        self.check.add(verify_seconds, self._table(self._batch * nodes))
        alive = [set(path) for path in paths if path]
        for rank in range(1, min(nodes, len(self._accepted) + 1)):
            share = sum(rank in path for path in alive) / max(len(alive), 1)
            self._tried[rank - 1] += 1
            weight = max(1 - _RANK_DECAY, 1 / (1 + self._tried[rank - 1]))
            self._accepted[rank - 1] += weight * (share - self._accepted[rank - 1])
        if nodes - 1 in self._seconds:
            spent, usual = draft_seconds + verify_seconds, self._seconds[nodes - 1]
            # Clip outliers, such as the first step of a size.
            self._seconds[nodes - 1] += 0.1 * (min(spent, 2 * usual) - usual)

    def _rate(self, size: int) -> float:
        """Expected tokens per second and row."""
        return (1 + sum(self._accepted[:size])) / self._seconds[size]
