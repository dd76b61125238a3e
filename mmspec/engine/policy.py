"""Drafting policy: whether to draft, and number, depth and shape of draft tokens per step.

A tree of n drafted nodes with path probabilities g_1 >= g_2 >= ... emits ``1 + sum(g_1..g_n)`` expected tokens. The time
of its step is learned from the steps themselves, in units of plain decode steps. Plain decoding is one of the arms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, log, log2, sqrt
from statistics import fmean

import numpy as np

from mmspec.core.plan import StepPlan, StepTimes
from mmspec.core.tree import TokenTree

_DEFAULT = StepPlan()
PLANS = StepPlan(64, 16, adaptive=True), StepPlan(64, 16, chain=True, adaptive=True)
STEADY_PLANS = (
    *(StepPlan(nodes, depth, adaptive=True) for nodes in (63, 31, 15, 7) for depth in (12, 4)),
    *(StepPlan(length, length, chain=True, adaptive=True) for length in (7, 3)),
)
"""Plans with static shapes, each with its own captured graphs. A chain and the root fill a padded pass."""


class DraftPolicy:
    """Drafts a fixed plan in every step; base class of policies.

    Args:
        fixed: the plan.
        static_shapes: whether drafts have static shapes, which no step may change.
    """

    def __init__(self, fixed: StepPlan = _DEFAULT, static_shapes: bool = False) -> None:
        self._fixed, self._static_shapes = fixed, static_shapes

    def begin(self, share: float) -> None:
        """Start new requests, which make up ``share`` of the batch."""

    def plan(self, rows: int, remaining: int) -> StepPlan:
        """Choose the next step's plan.

        Args:
            rows: batch size.
            remaining: draft tokens that the longest unfinished row can still accept.
        """
        return self._limited(self._fixed, remaining)

    def prune(self, plan: StepPlan, tree: TokenTree) -> TokenTree:
        """Prune a tree to its most probable nodes; sampled trees and trees without ``log_probs`` are kept whole."""
        if not tree.prunable:
            return tree
        tree = tree.best_chain() if plan.chain and not self._static_shapes else tree
        return tree.first(1 + plan.most_nodes)

    def observe(self, plan: StepPlan, tree: TokenTree, paths: list[list[int]], times: StepTimes) -> None:
        """Learn from a step.

        Args:
            tree: the verified tree.
            paths: accepted nodes per row, the root included; empty for finished rows.
        """

    def _limited(self, plan: StepPlan, remaining: int) -> StepPlan:
        if remaining <= 0:
            return replace(plan, nodes=0, depth=0)
        return plan if self._static_shapes or remaining >= plan.depth else replace(plan, depth=remaining)


_KNOTS = 11  # powers of two from 1
_OPTIMISM = 0.5
_LOAD_DRIFT = 0.03  # standard deviation of the change of log load, per step
_PRIOR_KNEE = 0.7
_CURVE_PRIOR, _CURVE_DRIFT = 0.1, 0.003  # standard deviations per octave, of the prior and of the change per step
_NOISE = 0.08  # standard deviation of a step's log time
_CURVE_DOUBT = 0.1
_OUTLIER = 2.5  # standard deviations to which residuals are clipped


class StepTimeModel:
    """Kalman filter of the log time of verify and commit by the number of tokens in the pass.

    The state is the log time of a step of one token, which follows other load on the machine, and the log ratio to it at
    powers of two.

    Args:
        free_tokens: prior of the number of tokens whose products take as long as reading the weights.
    """

    def __init__(self, free_tokens: float) -> None:
        tokens = 2.0 ** np.arange(_KNOTS)
        cubes = (tokens / free_tokens) ** 3
        times = np.log(1.0 + cubes) / 3
        slopes = cubes / (1.0 + cubes) - cubes[0] / (1.0 + cubes[0])  # of log time by log free_tokens, negative
        octaves = np.minimum.outer(np.arange(_KNOTS), np.arange(_KNOTS)).astype(float)
        self._state = times - times[0]
        self._covariance = _PRIOR_KNEE**2 * np.outer(slopes, slopes) + _CURVE_PRIOR**2 * octaves
        self._drift = _CURVE_DRIFT**2 * octaves
        self._drift[0, 0] = _LOAD_DRIFT**2
        self._doubt = _CURVE_DOUBT**2 * octaves
        self._known, self._last = False, 1

    def ratio(self, tokens: int, optimism: float = 0.0) -> float:
        """Time of a step in steps of one token, less some standard deviations."""
        at, share = self._place(tokens)
        low, high = (
            float(self._state[k] - optimism * sqrt(self._covariance[k, k])) if k else 0.0 for k in (at, at + 1)
        )
        return exp(low + share * (high - low))

    @property
    def seconds(self) -> float:
        """Current time of a step of one token."""
        return exp(self._state[0])

    def add(self, tokens: int, seconds: float) -> bool:
        at, share = self._place(tokens)
        read = np.zeros(_KNOTS)
        read[at + 1] = share
        read[at] += (1.0 - share) if at else 0.0
        read[0] = 1.0
        if not self._known:
            self._state[0] = log(seconds) - float(read[1:] @ self._state[1:])
            self._covariance[0, 0], self._known = 1.0, True
            self._last = tokens
            return False
        covariance = self._covariance + self._drift
        residual = log(max(seconds, 1e-9)) - float(read @ self._state)
        column = covariance @ read
        variance = float(read @ column) + _NOISE**2
        surprising = residual**2 > _OUTLIER**2 * variance
        if surprising:  # the load has changed, or the curve is wrong if the size has
            covariance[0, 0] += residual**2
            if abs(log2(tokens / self._last)) >= 1:
                covariance += residual**2 * self._doubt
            column = covariance @ read
            variance = float(read @ column) + _NOISE**2
        self._last = tokens
        self._state = self._state + column * (residual / variance)
        self._covariance = covariance - np.outer(column, column) / variance
        return surprising

    def _place(self, tokens: int) -> tuple[int, float]:
        position = log2(tokens)
        at = min(int(position), _KNOTS - 2)
        return at, position - at


_BINS = 16  # number of bins of path probabilities
_BIN_PRIOR = 6.0  # weight of the drafter's own probability, in observations
_BIN_DECAY = 0.995  # decay of a bin's observations, per observation


class Acceptance:
    """Observed acceptance of drafted nodes by their path probability, in bins of half octaves."""

    def __init__(self) -> None:
        self._accepted, self._seen = [0.0] * _BINS, [0.0] * _BINS

    def __call__(self, prob: float) -> float:
        """Acceptance rate of nodes with this path probability."""
        b = self._bin(prob)
        return (self._accepted[b] + _BIN_PRIOR * prob) / (self._seen[b] + _BIN_PRIOR)

    def add(self, prob: float, accepted: bool) -> None:
        b = self._bin(prob)
        self._seen[b] = self._seen[b] * _BIN_DECAY + 1.0
        self._accepted[b] = self._accepted[b] * _BIN_DECAY + accepted

    @staticmethod
    def _bin(prob: float) -> int:
        return min(int(-2.0 * log2(prob)), _BINS - 1) if prob > 0.0 else _BINS - 1


_RATE_DECAY = 0.98
_AGE = 0.995
_PRIOR_STEPS = 4.0
_PRIOR_RATE = 1.05
_PRIOR_DEVIATION = 1.0


class DecodingRate:
    """Tokens per time of an arm, from decaying sums, with a prior of a few steps."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # tokens, times, and their products

    def age(self, factor: float | None = None) -> None:
        self._sums *= _AGE if factor is None else factor

    def add(self, tokens: float, time: float) -> None:
        self._sums = _RATE_DECAY * self._sums + (tokens, time, tokens * tokens, tokens * time, time * time)

    def mean(self, prior: float | None = None) -> float:
        prior = _PRIOR_RATE if prior is None else prior
        return float((self._sums[0] + prior * _PRIOR_STEPS) / (self._sums[1] + _PRIOR_STEPS))

    def bound(self, prior: float, errors: float = 1.0) -> float:
        """Upper confidence bound, by the delta method."""
        mean = self.mean(prior)
        _, time, tokens2, product, time2 = self._sums
        squares = tokens2 - 2 * mean * product + mean**2 * time2 + _PRIOR_STEPS * _PRIOR_DEVIATION**2
        return float(mean + errors * sqrt(max(squares, 0.0)) / (time + _PRIOR_STEPS))


_EXPLORATION = 0.03
_CREDIT = 3.0
_RESUME = 1.0
_RUN = 4


class LevelTime:
    """Draft time by number of levels, from decaying sums, in steps of one token."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weight, levels, times, levels squared, product

    def add(self, levels: int, time: float) -> None:
        self._sums = 0.98 * self._sums + (1.0, levels, time, levels * levels, levels * time)

    @property
    def slope(self) -> float:
        """Time per level; before levels have varied, the time is spread over them and one pass more."""
        weight, levels, time, levels2, product = self._sums
        if not weight:
            return 0.0
        guess = time / (weight + levels)
        spread = levels2 - levels**2 / weight
        return float(max(product - levels * time / weight + 2.0 * guess, 0.0) / (spread + 2.0))

    @property
    def known(self) -> bool:
        return bool(self._sums[0])


class AdaptivePolicy(DraftPolicy):
    """Maximises tokens per time by discounted upper confidence bounds over plain decoding and plans.

    Exploration: steps of other arms than the best arm may lose at most 3 % of the decode time.
    """

    def __init__(
        self, static_shapes: bool = False, plans: Sequence[StepPlan] | None = None, free_tokens: float = 8.0
    ) -> None:
        super().__init__(static_shapes=static_shapes)
        self._plans = plans or (STEADY_PLANS if static_shapes else PLANS)
        self._time = StepTimeModel(free_tokens)
        self._acceptance = {False: Acceptance(), True: Acceptance()}
        self._levels = {False: LevelTime(), True: LevelTime()}
        self._rates: dict[int, list[DecodingRate]] = {}
        self._credit = _CREDIT
        self._run: tuple[int | None, int] = (None, 0)
        self._since_plain, self._anchors = 0, 2
        self._usual = 8.0
        self._price = 1.0

    def begin(self, share: float) -> None:
        for rates in self._rates.values():
            for rate in rates:
                rate.age(1.0 - 0.5 * share)
        self._credit = max(self._credit, _RESUME * share)

    def plan(self, rows: int, remaining: int) -> StepPlan:
        arm = self._choose(self._arms(rows))
        if arm is None:
            return self._limited(replace(self._plans[0], nodes=0, chain=False), remaining)
        plan = self._plans[arm]
        if not self._static_shapes:
            levels = self._levels[plan.chain]
            nodes = min(plan.nodes, 3 + int(1.5 * self._usual))
            plan = replace(plan, nodes=nodes, least_gain=levels.slope * self._price if levels.known else 1.0)
        return self._limited(plan, remaining)

    def _arms(self, rows: int) -> list[DecodingRate]:
        return self._rates.setdefault(rows.bit_length(), [DecodingRate() for _ in self._plans])

    def _choose(self, arms: list[DecodingRate]) -> int | None:
        """The arm of a step; None is plain decoding."""
        best = self._best(arms)
        if best is not None and self._since_plain >= self._anchors and self._credit > 0:
            return None
        arm, left = self._run
        if left > 0 and self._credit > 0:
            self._run = arm, left - 1
            return arm
        if self._credit >= _RESUME:
            rate = 1.0 if best is None else arms[best].mean()
            others = [number for number in range(len(arms)) if number != best]
            if others:
                bounds = {number: arms[number].bound(rate) for number in others}
                other = max(bounds, key=lambda number: bounds[number])
                if bounds[other] > rate:
                    self._run = other, _RUN - 1
                    return other
        return best

    def _best(self, arms: list[DecodingRate]) -> int | None:
        means = [arm.mean() for arm in arms]
        best = max(range(len(arms)), key=lambda number: means[number])
        return best if means[best] >= 1.0 else None

    def prune(self, plan: StepPlan, tree: TokenTree) -> TokenTree:
        if self._static_shapes or not tree.prunable:
            return super().prune(plan, tree)
        tree = tree.best_chain() if plan.chain else tree
        size = self._size(plan, tree.path_probs)
        if plan.nodes:
            self._usual += 0.2 * (size - self._usual)
        return tree.first(1 + size)

    def _size(self, plan: StepPlan, probs: Sequence[Sequence[float]]) -> int:
        """Number of drafted nodes per row with the most expected tokens, less the time at the recent rate."""
        rows, accepted = len(probs), self._acceptance[plan.chain]
        widest = min(plan.most_nodes, max(map(len, probs)))
        plain = self._time.ratio(rows)
        best, gain, most = 0, 0.0, 0.0
        for nodes in range(1, widest + 1):
            gain += sum(accepted(row[nodes - 1]) for row in probs if len(row) >= nodes) / rows
            profit = gain - self._price * (max(self._time.ratio(rows * (nodes + 1), _OPTIMISM) / plain, 1.0) - 1.0)
            if profit > most:
                best, most = nodes, profit
        return best

    def observe(self, plan: StepPlan, tree: TokenTree, paths: list[list[int]], times: StepTimes) -> None:
        rows, alive = tree.batch, [path for path in paths if path]
        expected = self._time.seconds * self._time.ratio(rows * tree.nodes)
        surprising = self._time.add(rows * tree.nodes, times.verify + times.commit)
        plain = self._time.seconds * self._time.ratio(rows)
        arms = self._arms(rows)
        for rate in arms:
            rate.age()
        time = min(times.total, 3.0 * expected + times.draft) / plain
        tokens = fmean(map(len, alive)) if alive else 1.0
        best = self._best(arms)
        self._price += 0.05 * ((1.0 if best is None else arms[best].mean()) - self._price)
        self._credit = min(self._credit + _EXPLORATION * time, _CREDIT)
        if not plan.nodes:
            self._since_plain = 0
            if best is not None and tree.nodes == 1:
                self._credit -= time * (1.0 - 1.0 / arms[best].mean())
                self._anchors = 2 if surprising else min(2 * self._anchors, 64)
            return
        self._since_plain += 1
        arm = self._arm(plan)
        if times.draft > 0:
            self._levels[plan.chain].add(times.levels, times.draft / plain)
        if arm != best:
            self._credit -= time - tokens / (1.0 if best is None else arms[best].mean())
        for number, share in self._taught(arm, alive):
            cost = time if number == arm else self._predicted(number, rows)
            arms[number].add(share, cost)
        if tree.prunable and not self._static_shapes:
            accepted = self._acceptance[plan.chain]
            for probs, path in zip(tree.path_probs, paths, strict=True):
                kept = set(path)
                for node, prob in enumerate(probs, start=1):
                    if path:
                        accepted.add(prob, node in kept)

    def _arm(self, plan: StepPlan) -> int:
        return next(
            number
            for number, other in enumerate(self._plans)
            if other.chain == plan.chain
            and (not self._static_shapes or (other.nodes, other.depth) == (plan.nodes, plan.depth))
        )

    def _taught(self, arm: int, paths: list[list[int]]) -> Iterator[tuple[int, float]]:
        """Arms whose trees are parts of the drafted tree, and the tokens that they would have emitted."""
        drafted = self._plans[arm]
        for number, plan in enumerate(self._plans):
            within = plan.chain == drafted.chain and plan.nodes <= drafted.nodes and plan.depth <= drafted.depth
            if within and paths:
                yield number, fmean(1 + sum(node <= plan.nodes for node in path[1 : 1 + plan.depth]) for path in paths)

    def _predicted(self, arm: int, rows: int) -> float:
        plan = self._plans[arm]
        levels = self._levels[plan.chain]
        passes = self._time.ratio(rows * (plan.nodes + 1)) / self._time.ratio(rows)
        return passes + levels.slope * plan.depth
