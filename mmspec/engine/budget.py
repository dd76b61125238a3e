"""Tree budgets: number of drafted nodes per step.

A tree of n drafted nodes with path probabilities g_1 >= g_2 >= ... emits ``1 + sum(g_1..g_n)`` expected tokens in
``t(n + 1)`` seconds. t is measured (``mmspec.engine.calibrate``); the probabilities are the drafter's, calibrated
by observed acceptance. Plain decoding, a tree of the root alone, is always a candidate.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from functools import partial
from math import hypot, inf, log2, sqrt
from statistics import median, median_low
from typing import TYPE_CHECKING, NamedTuple

from mmspec.core.budget import Budget, CostTable, DraftingPayoff
from mmspec.core.target import Target
from mmspec.engine.calibrate import cost_table, forget_cost, stored_cost
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.targets.transformers_target import sharded

if TYPE_CHECKING:
    from mmspec.core.tree import TokenTree


class DraftShape(NamedTuple):
    """Number of drafted nodes, whether they form a chain, and maximum depth."""

    nodes: int
    chain: bool
    depth: int


_DEPTH = 12  # levels of the deepest trees
_PLAIN = DraftShape(0, False, _DEPTH)
STEADY_SHAPES = (
    *(DraftShape(length, True, length) for length in (3, 7)),
    *(DraftShape(nodes, False, depth) for nodes in (7, 15, 31, 63) for depth in (4, _DEPTH)),
)
"""Chains and trees, each with captured graphs of its own. A pass over a chain and the root fills a padded size."""

_CALIBRATION = threading.Lock()  # concurrent measurements would disturb each other


class Budgets:
    """Budgets of a drafter on a target, and the target's calibration for the adaptive budget.

    Args:
        drafts: False for plain decoding.

    Attributes:
        adaptive: the adaptive budget; None before the first step that needs it.
    """

    def __init__(self, target: Target, drafts: bool) -> None:
        self._target, self._drafts = target, drafts
        self.adaptive: MeasuredBudget | None = None
        self._fixed: dict[int | None, Budget] = {}  # by draft tokens per step
        self._searched = False  # whether the target's stored cost was searched
        self._refused = False  # whether the target cannot be calibrated
        self._outdated = False  # whether passes contradicted the calibration

    def calibrate(self, adaptive: bool = True, *, refresh: bool = False) -> None:
        """Load the measured verify times of a target that has no sequences.

        Measures them if ``adaptive`` budgets need them and none are stored, or if passes contradicted them.

        Args:
            refresh: always measure.
        """
        target = self._target
        if sharded(target):  # clocks differ between ranks, and so would tree sizes
            return
        with _CALIBRATION:
            if target.cost is None and not self._searched:
                target.cost, self._searched = stored_cost(target), True
            needed = adaptive and self._drafts and not self._refused and (target.cost is None or self._outdated)
            if not (refresh or needed):
                return
            try:
                target.cost = cost_table(target, refresh=refresh)
            except UserError:  # a short attention window rejects large trees
                self._refused = True
            self.adaptive, self._outdated = None, False

    def of(self, batch: int, num_draft_tokens: int | None) -> Budget:
        """The budget of a step of ``batch`` rows: fixed at ``num_draft_tokens``, or adaptive if None."""
        cost, fixed = self._target.cost, num_draft_tokens if self._drafts else 0
        if fixed is None and self.adaptive is None and cost is not None:
            steady = kernels.static_shapes(self._target.device)
            self.adaptive = (SteadyBudget if steady else AdaptiveBudget)(cost, batch=batch)
        if fixed is not None or self.adaptive is None:
            return self._fixed.setdefault(fixed, Budget() if fixed is None else Budget(fixed))
        if self.adaptive.check.overestimated and not self._outdated:
            forget_cost(self._target)
            self._outdated = True  # measured again when there are no sequences
        self.adaptive.resize(batch)
        return self.adaptive


_OVERESTIMATE = 1.5  # ratio of calibrated to real pass time that contradicts the calibration
_CHECKED_PASSES = 32  # passes before the ratio is tested


class CalibrationCheck:
    """Detects verify passes far faster than calibrated, a sign that other load disturbed the calibration.

    Slower passes are not evidence: prefixes grow, and machines are busy.
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
        check: compares verify passes with the calibration.
    """

    def __init__(self, cost: CostTable, nodes: int, depth: int) -> None:
        super().__init__(nodes, depth)
        self._table, self.check = cost, CalibrationCheck()


_SLOPE_PRIOR = 2.0  # weight of the prior slope
_SLOPE_DECAY = 0.98  # decay of differences, per difference
_FIXED_WEIGHT = 0.05  # weight of a new step in ``fixed``
_OUTLIER = 1.25  # steps are clipped to this multiple of the expected time, against load on the machine


class StepTimeModel:
    """Linear model of a decode step's time by tree size, ``base + fixed + slope * x`` with known ``base``.

    The slope is fitted to differences of successive steps, which other load slows equally.

    Args:
        least: minimum of ``fixed``; above the negative of the smallest base.
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
            guess: prior of the slope.
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

    @property
    def measured(self) -> bool:
        return self._weight < 1.0

    def interrupt(self) -> None:
        """Skip the next difference: the next step differs from the last step by more than ``x``."""
        self._last = None


_FIRST_TRIALS = 256  # first draft steps, with shorter trial intervals
_TRIAL_INTERVALS = 32, 128  # draft steps between trials, at first and later
_TRIAL = 4  # length of a trial, in draft steps
_SHAPE_DECAY = 0.995  # decay of a shape's steps, per step
_SHAPE_ERRORS = 2.0  # standard errors by which the other shape must be faster


class DecodingRate:
    """Tokens per time of decode steps, and its standard error."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # sums of tokens, times, and their products

    def add(self, tokens: float, time: float) -> None:
        step = tokens, time, tokens * tokens, tokens * time, time * time
        self._sums = [_SHAPE_DECAY * total + value for total, value in zip(self._sums, step, strict=True)]

    @property
    def mean(self) -> float:
        return self._sums[0] / self._sums[1] if self._sums[1] else 0.0

    @property
    def error(self) -> float:
        """Standard error of tokens per time (delta method); infinite without steps."""
        if not self._sums[1]:
            return inf
        _, times, tokens2, product, times2 = self._sums
        rest = tokens2 - 2 * self.mean * product + self.mean**2 * times2
        return sqrt(max(rest, 0.0)) / times


class ShapeTrial:
    """Compares chains with trees of the same drafter by periodic trials of the other shape.

    Attributes:
        chains: whether chains decode significantly faster.
    """

    def __init__(self) -> None:
        self.chains = False
        self._rates = {False: DecodingRate(), True: DecodingRate()}
        self._steps = 0

    def chain(self) -> bool:
        """Whether to draft a chain in this step; called once per draft step."""
        self._steps += 1
        first, later = _TRIAL_INTERVALS
        interval = first if self._steps <= _FIRST_TRIALS else later
        return self.chains != (-self._steps % interval < _TRIAL)

    def add(self, chain: bool, tokens: float, time: float) -> None:
        """Add a draft step."""
        self._rates[chain].add(tokens, time)
        ours, other = self._rates[self.chains], self._rates[not self.chains]
        if other.mean - ours.mean > _SHAPE_ERRORS * hypot(ours.error, other.error):
            self.chains = not self.chains


class DraftStatistics:
    """Acceptance and draft cost of one shape (trees or chains)."""

    def __init__(self) -> None:
        self.accepted, self.seen = [0.0] * _BINS, [0.0] * _BINS
        self.drafting = StepTimeModel()  # draft time by tree depth, for consecutive draft steps


_BINS = 16  # number of bins of path probabilities
_BIN_PRIOR = 6.0  # prior weight per bin, in pseudo-observations that agree with the drafter
_BIN_DECAY = 0.995  # decay of a bin's observations, per observation
_PACE_DECAY = 0.95  # decay of recent tokens and seconds, per step
_FIRST_LEAST_GAIN = 1.0  # minimum gain of a level while level times are unknown: first drafts have one level
_FIRST_PLAIN = 2  # plain steps before the first draft
_PLAIN_STEPS = 5  # window of plain step times
_PLAIN_INTERVAL = 100  # draft steps between plain steps


class AdaptiveBudget(MeasuredBudget):
    """Adaptive tree size: maximises expected tokens minus verify time at the recent decoding rate.

    Trees are compared with chains (``ShapeTrial``), whose nodes cost less to draft. Learned estimates (acceptance by
    confidence, draft cost) are kept per shape, and persist between requests and batch sizes. Drafting pauses when
    recent draft steps took significantly more wall-clock time per token than plain steps (``DraftingPayoff``); plain
    steps are then measured again before draft steps, so that other load affects both. The unit of time is a plain step
    of the batch, tokens are per row.

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
        self._batch = 0  # largest batch since drafting was last retried
        self._rows = 1  # rows of the step
        self._beyond = StepTimeModel(least=-0.5)  # time of pass and commit beyond calibration, by draft tokens per row
        self._statistics = {False: DraftStatistics(), True: DraftStatistics()}  # keys: whether chains
        self._trials: dict[int, ShapeTrial] = defaultdict(ShapeTrial)  # by bits of the batch
        self._drafted: bool | None = None  # whether the last step drafted chains; None: it did not draft
        self._tokens, self._time = 1.0, 1.0  # recent tokens and time
        self._shown: list[list[float]] = []
        self._usual = 8.0
        self._payoff = DraftingPayoff()  # draft steps against plain steps
        self._plain: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=_PLAIN_STEPS))  # by bits of the batch
        self._since = 0  # draft steps since the last plain step
        self.resize(batch)

    def resize(self, batch: int) -> None:
        if batch != self._rows:
            self._rows = batch
            self._beyond.interrupt()
            for shape in self._statistics.values():
                shape.drafting.interrupt()
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
        if not measured or self._payoff.rests() or not super().drafts():
            return False
        self.chain = self._trials[self._rows.bit_length()].chain()
        return True

    @property
    def least_gain(self) -> float:
        drafting = self._statistics[self.chain].drafting
        return drafting.slope * self._tokens / self._time if drafting.measured else _FIRST_LEAST_GAIN

    def prune(self, tree: TokenTree) -> TokenTree:
        tree = self.shaped(tree)
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
        shape: Hashable = None,
    ) -> None:
        drafts = min(nodes, len(self._cost)) - 1
        self.check.add(verify_seconds, self._cost[drafts])
        rest = verify_seconds + commit_seconds
        self._beyond.add(drafts, rest / self._cost[0], self._cost[drafts] / self._cost[0])
        spent = 1.0 + self._extra(drafts)
        if draft_seconds > 0:
            # Relative to the same step's verify pass: other load slows both.
            drafted = draft_seconds / rest * spent
            drafting = self._statistics[self.chain].drafting
            if self._drafted is not self.chain:
                drafting.interrupt()
            if self._drafted is not None:
                drafting.add(self.levels, drafted, guess=drafted / (1 + self.levels))
            spent += drafted
        self._drafted = self.chain if draft_seconds > 0 else None
        emitted = sum(map(len, paths)) / max(sum(map(bool, paths)), 1)
        time, plain = (draft_seconds + rest) / self._cost[0], self._plain[self._rows.bit_length()]
        if draft_seconds == 0:
            plain.append(time)
            self._since = 0
        elif plain:  # grammars may force tokens in the first steps
            self._payoff.add(emitted - time / median_low(plain))
            self._trials[self._rows.bit_length()].add(self.chain, emitted, time)
            self._since += 1
        self._tokens = _PACE_DECAY * self._tokens + emitted
        self._time = _PACE_DECAY * self._time + spent
        for row, path in zip(self._shown, paths, strict=False):
            if not path:
                continue  # a finished row
            kept, shown = set(path), self._statistics[self.chain]
            for i, gain in enumerate(row, start=1):
                b = _bin(gain)
                shown.seen[b] = shown.seen[b] * _BIN_DECAY + 1.0
                shown.accepted[b] = shown.accepted[b] * _BIN_DECAY + (i in kept)
        self._shown = []

    def _extra(self, nodes: int) -> float:
        """Cost of a tree of ``nodes`` drafted nodes beyond plain decoding."""
        beyond = self._cost[nodes] / self._cost[0] - 1.0 + self._beyond.slope * nodes
        return beyond / (1.0 + self._beyond.fixed)

    def _correct(self, gain: float) -> float:
        """Calibrated acceptance probability of a node with path probability ``gain``."""
        b, shape = _bin(gain), self._statistics[self.chain]
        return (shape.accepted[b] + _BIN_PRIOR * gain) / (shape.seen[b] + _BIN_PRIOR)


def _bin(gain: float) -> int:
    """Index of a probability's bin; bins are half octaves: 1, 0.7, 0.5, 0.35, ..."""
    return min(int(-2.0 * log2(gain)), _BINS - 1) if gain > 0.0 else _BINS - 1


_PROBE_INTERVAL = 64  # steps between probes of another shape
_FIRST_ACCEPTANCE = 0.6  # initial acceptance rate of the most probable node
_FIRST_REACHED = 0.8  # initial share of paths that reach the next level
_KNOWN = 8  # steps after which a shape's rates are known
_RANK_DECAY = 0.98  # decay of acceptance per rank or level, per step
_FIRST_DRAFT_COST = 0.2  # initial cost of the deepest draft, in plain steps


class Rates:
    """Decaying average rates of numbered events (ranks or levels), with initial estimates.

    Args:
        first: initial rates of the events 1, 2, ...
    """

    def __init__(self, first: Sequence[float]) -> None:
        self._rates, self._tried = list(first), [0] * len(first)

    def add(self, number: int, share: float) -> None:
        """Add a step in which the event occurred in ``share`` of the rows."""
        self._tried[number - 1] += 1
        weight = max(1 - _RANK_DECAY, 1 / (1 + self._tried[number - 1]))
        self._rates[number - 1] += weight * (share - self._rates[number - 1])

    def total(self, numbers: int) -> float:
        """Sum of the first ``numbers`` rates."""
        return sum(self._rates[:numbers])

    @property
    def known(self) -> bool:
        """Whether enough steps were added for the first rate."""
        return self._tried[0] >= _KNOWN


class SteadyBudget(MeasuredBudget):
    """A tree's size and depth, or a chain's length, chosen before drafting, without a host sync on probabilities.

    Expected tokens come from the acceptance rate of each rank (n-th most probable node of a tree, or n-th of a chain).
    Until shallow trees have been drafted, they are expected to emit as many tokens as the first levels of deep trees.
    Costs are measured step times by batch size and shape (replayed graphs of draft and verify pass), initialised from
    the calibration. Other shapes are probed periodically.

    Args:
        cost: as for ``MeasuredBudget``.
        shapes: candidates in addition to plain decoding.
    """

    def __init__(self, cost: CostTable, shapes: Sequence[DraftShape] = STEADY_SHAPES, batch: int = 1) -> None:
        most, deepest = max(shape.nodes for shape in shapes), max(shape.depth for shape in shapes)
        super().__init__(cost, most, deepest)
        self._shapes, self._deepest = [_PLAIN, *shapes], deepest
        self._spent: dict[int, dict[DraftShape, float]] = {}  # by batch size and shape: seconds of a step
        self.resize(batch)
        ranks = range(1, most + 1)
        self._chains = Rates([_FIRST_ACCEPTANCE**rank for rank in ranks])  # acceptance by rank
        self._trees = {  # acceptance by rank, by tree depth
            depth: Rates([_FIRST_ACCEPTANCE / rank**0.5 for rank in ranks])
            for depth in {deepest, *(shape.depth for shape in shapes if not shape.chain)}
        }
        self._reached = Rates(
            [_FIRST_REACHED**level for level in range(1, deepest + 1)]
        )  # share of paths by level, in deep trees
        self._steps = 0

    def resize(self, batch: int) -> None:
        if batch not in self._spent:
            level = _FIRST_DRAFT_COST * self._table(batch) / self._deepest
            self._spent[batch] = {
                shape: self._table(batch * (shape.nodes + 1)) + level * min(shape.depth, shape.nodes)
                for shape in self._shapes
            }
        self._seconds, self._batch = self._spent[batch], batch

    @property
    def shape(self) -> DraftShape:
        return DraftShape(self.nodes, self.chain, self.depth)

    def drafts(self) -> bool:
        self._steps += 1
        best = max(self._shapes, key=self._rate)
        if self._steps % _PROBE_INTERVAL == 0:
            others = self._neighbours(best)
            best = others[self._steps // _PROBE_INTERVAL % len(others)]
        self.nodes, self.chain, self.depth = best
        return super().drafts()

    def _neighbours(self, best: DraftShape) -> list[DraftShape]:
        """Adjacent shapes to probe: next smaller and larger sizes, other depths, and the other kind."""
        alike = [shape for shape in self._shapes if shape.chain == best.chain and shape.depth == best.depth]
        alike = alike if len(alike) > 1 else [shape for shape in self._shapes if shape.chain == best.chain]
        place = alike.index(best)
        near = [*alike[place + 1 : place + 2], *alike[max(place - 1, 0) : place]]
        deeper = [one for one in self._shapes if one.nodes == best.nodes and one.chain == best.chain and one != best]
        other = [one for one in self._shapes if one.nodes and one.chain != best.chain]
        others = [*near, *deeper]
        turn = self._steps // _PROBE_INTERVAL // (1 + len(others))
        return [*others, *(other[turn % len(other) :][:1] if other else [])]

    def observe(
        self,
        nodes: int,
        paths: list[list[int]],
        draft_seconds: float,
        verify_seconds: float,
        commit_seconds: float = 0.0,
        shape: Hashable = None,
    ) -> None:
        self.check.add(verify_seconds, self._table(self._batch * nodes))
        shape = self.shape if shape is None else shape
        assert isinstance(shape, DraftShape)
        alive = [set(path) for path in paths if path]
        count = max(len(alive), 1)
        accepted = self._rates_of(shape)
        for rank in range(1, min(nodes, shape.nodes + 1)):
            accepted.add(rank, sum(rank in path for path in alive) / count)
        if nodes > 1 and not shape.chain and shape.depth == self._deepest:
            for level in range(1, shape.depth + 1):
                self._reached.add(level, sum(len(path) > level for path in alive) / count)
        shape = shape if nodes > 1 else _PLAIN
        if shape in self._seconds and nodes in (1, shape.nodes + 1):
            spent, usual = draft_seconds + verify_seconds, self._seconds[shape]
            # Clip outliers, such as the first step of a shape.
            self._seconds[shape] += 0.1 * (min(spent, 2 * usual) - usual)

    def _rates_of(self, shape: DraftShape) -> Rates:
        return self._chains if shape.chain else self._trees.get(shape.depth, self._trees[self._deepest])

    def _rate(self, shape: DraftShape) -> float:
        """Expected tokens per second and row."""
        rates = self._rates_of(shape)
        tokens = rates.total(shape.nodes)
        if not shape.chain and shape.depth < self._deepest and not rates.known:
            tokens = min(self._trees[self._deepest].total(shape.nodes), self._reached.total(shape.depth))
        return (1.0 + tokens) / self._seconds[shape]
