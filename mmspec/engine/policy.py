"""Drafting policy: whether to draft, and number, depth and shape of draft tokens per step; shared use of drafters.

A tree of n drafted nodes with path probabilities g_1 >= g_2 >= ... emits ``1 + sum(g_1..g_n)`` expected tokens. The
time of its step is learned from the steps themselves, in units of plain decode steps.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import exp, log, log2, sqrt
from statistics import fmean
from typing import Any

import numpy as np

from mmspec.core.drafter import Drafter, Guard, as_drafter
from mmspec.core.plan import Exploration, StepPlan, StepTimes
from mmspec.core.target import Target
from mmspec.core.tree import TokenTree
from mmspec.ops import cpu_library, kernels
from mmspec.targets.packing import weights_kind
from mmspec.targets.transformers_target import TransformersTarget, sharded

_DEFAULT = StepPlan()
PLANS = StepPlan(64, 16, adaptive=True), StepPlan(64, 16, chain=True, adaptive=True)
STEADY_PLANS = (
    *(StepPlan(nodes, depth, adaptive=True) for nodes in (63, 31, 15, 7) for depth in (12, 4)),
    *(StepPlan(length, length, chain=True, adaptive=True) for length in (7, 3)),
)
"""Plans with static shapes, each with its own captured graphs. A chain and the root fill a padded pass."""


class DraftPolicy:
    """Drafts a fixed plan in every step; base class of policies. ``static_shapes``: whether drafts have static shapes,
    which no step may change."""

    def __init__(self, fixed: StepPlan = _DEFAULT, static_shapes: bool = False) -> None:
        self._fixed, self._static_shapes = fixed, static_shapes

    def begin(self, share: float) -> None:
        """Start new requests, which make up ``share`` of the batch."""

    def plan(self, rows: int, remaining: int) -> StepPlan:
        """Choose the next step's plan; the longest of ``rows`` rows can still accept ``remaining`` draft tokens."""
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


_KNOTS = 13  # powers of two from 1
_KNEE_PRIOR = 0.7  # standard deviation of log ``free_tokens``
_CURVE_PRIOR, _CURVE_DRIFT, _CURVE_DOUBT = 0.1, 0.003, 0.1  # per octave: prior, change per step, after surprises
_LOAD_DRIFT = 0.03  # standard deviation of the change of log load, per step
_NOISE = 0.08  # standard deviation of a step's log time
_SURPRISE = 2.5  # standard deviations beyond which a residual is a surprise
_OPTIMISM = 0.5  # standard deviations below the expected ratios, so that uncertain sizes are tried


class StepTimeModel:
    """Kalman filter of a step's log time (verify pass and commit) by the number of tokens in the pass.

    The state is the log time of a step of one token, which follows other load on the machine, and the log ratios to it
    at powers of two. The prior of the ratios is the roofline: reading the weights takes as long as the products of
    ``free_tokens`` tokens.
    """

    def __init__(self, free_tokens: float) -> None:
        products = (2.0 ** np.arange(_KNOTS) / free_tokens) ** 3  # cubes: a smooth maximum of reading and products
        steepness = products / (1.0 + products)  # derivative of the log time by the negative log of ``free_tokens``
        octaves = np.minimum.outer(np.arange(_KNOTS), np.arange(_KNOTS)).astype(float)
        self._state = (np.log(1.0 + products) - np.log(1.0 + products[0])) / 3
        self._covariance = _CURVE_PRIOR**2 * octaves
        self._covariance += _KNEE_PRIOR**2 * np.outer(steepness - steepness[0], steepness - steepness[0])
        self._drift, self._doubt = _CURVE_DRIFT**2 * octaves, _CURVE_DOUBT**2 * octaves
        self._drift[0, 0] = _LOAD_DRIFT**2
        self._last = 0  # tokens of the last step

    @property
    def seconds(self) -> float:
        """Current time of a step of one token."""
        return exp(self._state[0])

    def ratio(self, tokens: int, base: int) -> float:
        """Time of a step with this number of tokens, in steps of ``base`` tokens."""
        return 1.0 if tokens == base else float(self.ratios((base, tokens))[1])

    def ratios(self, tokens: Sequence[int] | np.ndarray, optimism: float = 0.0) -> np.ndarray:
        """Times of steps with these numbers of tokens, in steps of the first, less ``optimism`` standard deviations."""
        log_ratios = self._state - optimism * np.sqrt(np.diagonal(self._covariance))
        log_ratios[0] = 0.0
        found = np.exp(np.interp(np.log2(tokens), np.arange(_KNOTS), log_ratios))
        return np.maximum(found / found[0], 1.0)

    def add(self, tokens: int, seconds: float) -> bool:
        """Add a step. Returns whether its time was a surprise."""
        position = log2(tokens)
        at = min(int(position), _KNOTS - 2)
        read = {at: 1.0 + at - position, at + 1: position - at} | {0: 1.0}  # weights of the state's entries
        residual = log(max(seconds, 1e-9)) - self._read(self._state, read)
        before, self._last = self._last, tokens
        covariance = self._covariance
        if not before:  # the first step may also compile kernels
            self._state[0] += residual
            covariance[0, 0] = 1.0
            return False
        covariance += self._drift
        column = self._read(covariance, read)
        surprise = residual**2 > _SURPRISE**2 * (self._read(column, read) + _NOISE**2)
        if surprise:  # the load has changed; or the ratio is wrong, if the size has changed
            covariance[0, 0] += residual**2
            if abs(log2(tokens / before)) >= 1.0:
                covariance += residual**2 * self._doubt
            column = self._read(covariance, read)
        variance = self._read(column, read) + _NOISE**2
        self._state += column * (residual / variance)
        covariance -= column[:, None] * (column / variance)
        return bool(surprise)

    @staticmethod
    def _read(values: np.ndarray, weights: dict[int, float]) -> Any:
        """Weighted sum along the first axis: few weights are not 0."""
        return sum(weight * values[at] for at, weight in weights.items() if weight)


_LEVELS_DECAY, _SLOPE_PRIOR = 0.98, 2.0


class DraftTimeModel:
    """Linear regression of the draft time, in plain steps, by number of levels."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of weights, levels, times, squared levels, and levels times times

    def add(self, levels: int, time: float) -> None:
        self._sums = _LEVELS_DECAY * self._sums + (1.0, levels, time, levels * levels, levels * time)

    @property
    def slope(self) -> float:
        """Time per level; before levels have varied, the draft's other costs count as one level. 0 without drafts."""
        weight, levels, time, levels2, product = map(float, self._sums)
        if not weight:
            return 0.0
        spread, common = levels2 - levels**2 / weight, product - levels * time / weight
        return max(common + _SLOPE_PRIOR * time / (weight + levels), 0.0) / (spread + _SLOPE_PRIOR)

    def __call__(self, levels: int) -> float:
        """Time of a draft."""
        weight, drafted, time, *_ = map(float, self._sums)
        return max(time + self.slope * (weight * levels - drafted), 0.0) / weight if weight else 0.0


_BINS = 16  # bins of path probabilities: half octaves, 1, 0.7, 0.5, 0.35, ...
_BIN_PRIOR = 6.0  # weight of the drafter's own probability, in observations
_BIN_DECAY = 0.995  # decay of a bin's observations, per observation


class Acceptance:
    """Observed acceptance rate of drafted nodes by their path probability."""

    def __init__(self) -> None:
        self._accepted, self._seen = [0.0] * _BINS, [0.0] * _BINS

    def __call__(self, prob: float) -> float:
        b = self._bin(prob)
        return (self._accepted[b] + _BIN_PRIOR * prob) / (self._seen[b] + _BIN_PRIOR)

    def add(self, prob: float, accepted: bool) -> None:
        b = self._bin(prob)
        self._seen[b] = self._seen[b] * _BIN_DECAY + 1.0
        self._accepted[b] = self._accepted[b] * _BIN_DECAY + accepted

    @staticmethod
    def _bin(prob: float) -> int:
        return min(int(-2.0 * log2(prob)), _BINS - 1) if prob > 0.0 else _BINS - 1


_STEP_DECAY, _AGE_DECAY = 0.98, 0.995  # decay of an arm's steps, per step of this arm and per step of any arm
_PRIOR_STEPS, _PRIOR_RATE = 4.0, 1.05  # steps of an untried arm, and their tokens per time
_PRIOR_DEVIATION = 1.0  # standard deviation of their tokens


class DecodingRate:
    """Tokens per time of an arm's recent steps, in plain steps."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of tokens, times, and their products

    def add(self, tokens: float, time: float) -> None:
        self._sums = _STEP_DECAY * self._sums + (tokens, time, tokens * tokens, tokens * time, time * time)

    @property
    def tried(self) -> bool:
        return self._sums[1] > 0.0

    def age(self, factor: float = _AGE_DECAY) -> None:
        self._sums *= factor

    def mean(self, prior: float = _PRIOR_RATE) -> float:
        return float(self._sums[0] + prior * _PRIOR_STEPS) / float(self._sums[1] + _PRIOR_STEPS)

    def bound(self, prior: float) -> float:
        """The mean plus a standard error (delta method)."""
        mean = self.mean(prior)
        _, time, tokens2, product, time2 = map(float, self._sums)
        squares = tokens2 - 2.0 * mean * product + mean**2 * time2 + _PRIOR_STEPS * _PRIOR_DEVIATION**2
        return mean + sqrt(max(squares, 0.0)) / (time + _PRIOR_STEPS)


_RUN = 4  # successive steps of an explored arm
_FIRST_NODES, _NODES_WEIGHT = 8.0, 0.2  # mean pruned size: initial value, weight of a step
_PLAIN_INTERVALS = 2, 64  # draft steps between plain steps: at first, doubling up to


class AdaptivePolicy(DraftPolicy):
    """Maximises tokens per second, by discounted upper confidence bounds over plain decoding and a few plans.

    Times are in plain steps of the batch, tokens per row. The best arm has the highest recent rate; plain decoding has
    the rate 1. Other arms whose rate may be higher are explored within the limit of ``Exploration``, and so are plain
    steps, from which the unit of time is learned. The learned state persists between requests.

    Without static shapes, the plans limit trees and chains, which ``prune`` cuts to the size with the most expected
    tokens less the time at the recent rate. With static shapes, each plan is an arm of its own, as the host does not
    read probabilities; a step also teaches arms whose trees are parts of its tree.

    Args:
        plans: arms other than plain decoding, the first to be tried first; None is ``PLANS`` or ``STEADY_PLANS``.
        free_tokens: see ``StepTimeModel``.
    """

    def __init__(
        self, static_shapes: bool = False, plans: Sequence[StepPlan] | None = None, free_tokens: float = 8.0
    ) -> None:
        super().__init__(static_shapes=static_shapes)
        self._plans = plans or (STEADY_PLANS if static_shapes else PLANS)
        self._time = StepTimeModel(free_tokens)
        self._acceptance = {chain: Acceptance() for chain in (False, True)}
        self._draft_time = {chain: DraftTimeModel() for chain in (False, True)}
        self._rates: dict[int, list[DecodingRate]] = {}  # of all plans, by bits of the batch size
        self._exploration = Exploration()
        self._explored, self._left = 0, 0  # the explored arm, and its remaining steps
        self._interval, self._since_plain = _PLAIN_INTERVALS[0], 0
        self._usual = _FIRST_NODES

    def begin(self, share: float) -> None:
        for rates in self._rates.values():
            for rate in rates:
                rate.age(1.0 - 0.5 * share)
        self._exploration.renew(share)

    def plan(self, rows: int, remaining: int) -> StepPlan:
        rates = self._of(rows)
        best, rate = self._best(rates)
        arm = self._choose(rates, best, rate)
        plan = self._plans[arm or 0]
        if arm is None:
            plan = replace(plan, nodes=0)
        elif not self._static_shapes:
            # Candidates cost draft time: request only somewhat more than was used lately.
            nodes = min(plan.nodes, 3 + int(1.5 * self._usual))
            level = self._draft_time[plan.chain].slope
            plan = replace(plan, nodes=nodes, least_gain=level * rate if level else 1.0)
        return self._limited(plan, remaining)

    def prune(self, plan: StepPlan, tree: TokenTree) -> TokenTree:
        if self._static_shapes or not tree.prunable:
            return super().prune(plan, tree)
        tree = tree.best_chain() if plan.chain else tree
        size = self._size(plan, tree.path_probs)
        if plan.nodes:
            self._usual += _NODES_WEIGHT * (size - self._usual)
        return tree.first(1 + size)

    def observe(self, plan: StepPlan, tree: TokenTree, paths: list[list[int]], times: StepTimes) -> None:
        rows, rest = tree.batch, times.verify + times.commit
        rates = self._of(rows)
        best, rate = self._best(rates)
        surprise = self._time.add(rows * tree.nodes, rest)
        plain = self._time.seconds * self._time.ratio(rows, 1)
        expected = self._time.ratio(rows * tree.nodes, rows)
        time = min(rest / plain, 3.0 * expected) + times.draft / plain  # other load is not a shape's
        for each in rates:
            each.age()
        if not plan.nodes:
            if tree.nodes == 1 and best is not None:
                first, most = _PLAIN_INTERVALS
                self._interval = first if surprise else min(2 * self._interval, most)
            self._since_plain = 0
            self._exploration.elapse(time, time * (1.0 - 1.0 / rate))
            return
        self._since_plain += 1
        alive = [path for path in paths if path]
        arm = next(number for number, other in enumerate(self._plans) if self._key(other) == self._key(plan))
        tokens = fmean(map(len, alive)) if alive else 1.0
        self._exploration.elapse(time, 0.0 if arm == best else time - tokens / rate)
        if times.draft > 0.0:
            levels = plan.depth if self._static_shapes else times.levels
            self._draft_time[plan.chain].add(levels, times.draft / plain)
        rates[arm].add(tokens, time)
        if self._static_shapes:
            self._teach_parts(rates, arm, alive, rows)
        elif tree.prunable:
            accepted = self._acceptance[plan.chain]
            for path, probs in zip(paths, tree.path_probs, strict=True):
                for node, prob in enumerate(probs if path else (), start=1):
                    accepted.add(prob, node in path)

    def _of(self, rows: int) -> list[DecodingRate]:
        return self._rates.setdefault(rows.bit_length(), [DecodingRate() for _ in self._plans])

    def _best(self, rates: list[DecodingRate]) -> tuple[int | None, float]:
        """The arm with the highest rate, None for plain decoding, and its rate."""
        rate, arm = max((rate.mean(), -arm) for arm, rate in enumerate(rates))
        return (-arm, rate) if rate >= 1.0 else (None, 1.0)

    def _choose(self, rates: list[DecodingRate], best: int | None, rate: float) -> int | None:
        """The arm of the next step; None is plain decoding."""
        allowed = self._exploration.allowed
        self._left = self._left - 1 if allowed else 0
        if not allowed:
            return best
        if best is not None and self._since_plain >= self._interval:
            return None
        if self._left > 0:
            return self._explored
        others = [(other.bound(rate), -arm) for arm, other in enumerate(rates) if arm != best]
        if not others or max(others)[0] <= rate or (best is not None and not rates[best].tried):
            return best
        self._explored, self._left = -max(others)[1], _RUN
        return self._explored

    def _size(self, plan: StepPlan, probs: Sequence[Sequence[float]]) -> int:
        """Number of drafted nodes per row with the most expected tokens, less their time at the recent rate."""
        rows, accepted = len(probs), self._acceptance[plan.chain]
        widest = min(plan.most_nodes, max(map(len, probs)))
        _, rate = self._best(self._of(rows))
        times = self._time.ratios(rows * np.arange(1, 2 + widest), _OPTIMISM).tolist()
        size, tokens, profit = 0, 0.0, 0.0
        for nodes in range(1, 1 + widest):
            tokens += sum(accepted(row[nodes - 1]) for row in probs if len(row) >= nodes) / rows
            if tokens - rate * (times[nodes] - 1.0) > profit:
                size, profit = nodes, tokens - rate * (times[nodes] - 1.0)
        return size

    def _key(self, plan: StepPlan) -> Hashable:
        return (plan.nodes, plan.depth, plan.chain) if self._static_shapes else plan.chain

    def _teach_parts(self, rates: list[DecodingRate], drafted: int, paths: list[list[int]], rows: int) -> None:
        """Add the step to the arms whose trees are parts of the drafted tree: nodes are in descending order."""
        whole = self._plans[drafted]
        for arm, plan in enumerate(self._plans):
            part = plan.chain == whole.chain and plan.nodes <= whole.nodes and plan.depth <= whole.depth
            if part and arm != drafted and paths:
                tokens = fmean(1 + sum(node <= plan.nodes for node in path[1 : 1 + plan.depth]) for path in paths)
                verify = self._time.ratio(rows * (1 + plan.nodes), rows)
                rates[arm].add(tokens, verify + self._draft_time[plan.chain](plan.depth))


_RELEASED = threading.Condition()
_OWNERS: dict[int, Speculation] = {}  # owner by drafter id, while it drafts for running sequences
_WANTED: Counter[int] = Counter()  # number of waiting engines by drafter id


class Speculation:
    """A drafter and its policies on one target, shared by all requests of a batch.

    Args:
        drafter: the drafter; None decodes plainly.
        adaptive: policy with the learned state of an earlier speculation; None starts without history.

    Attributes:
        guard: wraps the drafter in decode steps, so that its errors do not end sequences.
        adaptive: policy of requests without a fixed number of draft tokens. A sharded target has a fixed policy, as
            clocks differ between ranks.

    Raises:
        UserError: the drafter was trained for another target.
    """

    def __init__(self, target: Target, drafter: Drafter | None, adaptive: DraftPolicy | None = None) -> None:
        self.target = target
        self.drafter = None if drafter is None else as_drafter(drafter)
        self.guard = None if self.drafter is None else Guard(self.drafter)
        self._static_shapes = kernels.static_shapes(target.device)
        if adaptive is None and (drafter is None or sharded(target)):
            adaptive = DraftPolicy(static_shapes=self._static_shapes)
        self.adaptive = adaptive or AdaptivePolicy(self._static_shapes, free_tokens=_free_tokens(target))
        self._fixed: dict[int, DraftPolicy] = {}  # by draft tokens per step
        self._parts = self.drafter.members if self.drafter else []
        self.acquire()
        self.release()

    def policy(self, num_draft_tokens: int | None) -> DraftPolicy:
        """The policy of a fixed number of draft tokens per step, or the adaptive policy if None."""
        if num_draft_tokens is None:
            return self.adaptive
        fixed = DraftPolicy(StepPlan(num_draft_tokens), self._static_shapes)
        return self._fixed.setdefault(num_draft_tokens, fixed)

    def acquire(self) -> None:
        """Wait until no other target uses the drafter, then attach it.

        No deadlock: an engine that waits here runs no sequences and holds no other drafter.
        """
        mine = {id(part) for part in self._parts}
        with _RELEASED:
            _WANTED.update(mine)
            _RELEASED.wait_for(lambda: mine.isdisjoint(_OWNERS))
            _WANTED.subtract(mine)
            _OWNERS.update(dict.fromkeys(mine, self))
        if self.drafter is not None:
            try:
                self.drafter.attach(self.target)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Let other targets use the drafter."""
        with _RELEASED:
            for part in self._parts:
                if _OWNERS.get(id(part)) is self:
                    del _OWNERS[id(part)]
            _RELEASED.notify_all()

    @property
    def wanted(self) -> bool:
        """Whether another engine waits for the drafter."""
        with _RELEASED:
            return any(_WANTED[id(part)] for part in self._parts)

    def shares(self, other: Speculation) -> bool:
        """Whether the two have a drafter in common."""
        return any(part is candidate for part in self._parts for candidate in other._parts)


def _free_tokens(target: Target) -> float:
    """Prior of ``StepTimeModel``: tokens whose products take as long as reading the weights, by the kernels' rates."""
    if target.device.type != "cpu":
        return 128.0
    if not isinstance(target, TransformersTarget) or weights_kind(target.model) is None:
        return 16.0  # Python and torch's kernels take a time that hardly depends on the tokens
    return {"AVX-512 VNNI": 5.0, "AVX-VNNI": 2.4}.get(cpu_library.functions().instructions().decode(), 2.0)
