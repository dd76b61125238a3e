"""Policies in simulated decoding: times and acceptance are given, rates are compared with the best fixed plan."""

import random
from dataclasses import replace
from math import exp
from statistics import fmean

import numpy as np
import pytest
import torch

from mmspec.core.plan import Exploration, Payoff, StepPlan, StepTimes
from mmspec.core.tree import TokenTree, build_tree
from mmspec.drafters.growth import best_first
from mmspec.drafters.ngram import Ngram
from mmspec.engine.policy import Acceptance, AdaptivePolicy, DraftPolicy, DraftTimeModel, Speculation, StepTimeModel
from mmspec.targets.transformers_target import TransformersTarget
from tests.ranks import alone
from tests.tiny import byte_model

TOKENS = 1, 2, 4, 8, 16, 32, 64, 512
AVX2 = 1, 1.36, 2.07, 4.0, 7.9, 15.8, 31.6, 253
VNNI = 1, 1.02, 1.1, 1.4, 2.68, 5.3, 10.6, 85
FLAT = 1, 1.0, 1.02, 1.05, 1.15, 1.3, 1.7, 7
COPIES, GOOD, POOR = (0.9,), (0.6, 0.15, 0.05), (0.06, 0.03)
STATIC = StepPlan(15, 4, adaptive=True), StepPlan(7, 4, adaptive=True), StepPlan(3, 3, chain=True, adaptive=True)


class Machine:
    """Decodes with a policy.

    Args:
        times: of passes over ``TOKENS`` tokens, in plain steps.
        children: acceptance rate of each child of a node.
        claimed: what the drafter says instead.
        level: time of a drafter's level, in plain steps; 0 drafts whole trees.
        load: by step, factor of all times from then on.
    """

    def __init__(self, times, children, *, claimed=None, level=0.0, load=(), seed=0):
        self.times, self.children, self.claimed = times, children, claimed or children
        self.level, self.load, self.rng, self.factor, self.steps = level, dict(load), random.Random(seed), 1.0, 0

    def seconds(self, tokens):
        return 0.03 * float(np.interp(tokens, TOKENS, self.times)) * self.factor * exp(self.rng.gauss(0, 0.04))

    def draft(self, plan, rows):
        """Trees, and the nodes of each that the target would choose."""
        depth, drafts, chosen = plan.depth, [], []
        if self.level:
            depth = next((n for n in range(1, depth) if sum(self.claimed) ** n <= plan.least_gain), depth)
        claimed = dict(enumerate(self.claimed[: 1 if plan.chain else None]))
        for _ in range(rows):
            path = self.rng.choices(
                [*range(len(self.children)), None], [*self.children, 1 - sum(self.children)], k=depth
            )
            children = lambda level: [(token, share, level + 1) for token, share in claimed.items()]  # noqa: E731
            tokens, parents, _ = draft = best_first(0, children, depth, plan.nodes, plan.floor)
            right = [(0, 0)]  # nodes of the path, and their levels
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
                if parent == right[-1][0] and token == path[right[-1][1]]:
                    right.append((node, right[-1][1] + 1))
            drafts.append(draft)
            chosen.append([node for node, _ in right])
        tree = build_tree(torch.zeros(rows, dtype=torch.long), [row[:2] for row in drafts], [row[2] for row in drafts])
        tree.levels = tree.max_depth
        return tree, chosen

    def step(self, policy, rows=1):
        """The plan, tokens per row and seconds of a step."""
        self.factor = self.load.get(self.steps, self.factor)
        self.steps += 1
        plan = policy.plan(rows, 1000)
        tree, paths, draft = TokenTree.root(torch.zeros(rows, dtype=torch.long)), [[0]] * rows, 0.0
        if plan.nodes:
            tree, paths = self.draft(plan, rows)
            draft = 0.03 * self.factor * (0.02 + self.level * tree.levels)
        levels, tree = tree.levels, policy.prune(plan, tree)
        paths = [[node for node in path if node < tree.nodes] for path in paths]
        verify = self.seconds(rows * tree.nodes)
        policy.observe(plan, tree, paths, StepTimes(draft, verify, levels=levels))
        return plan, fmean(map(len, paths)), draft + verify

    def rate(self, policy, steps, rows=1):
        """Tokens per row and plain step."""
        taken = [self.step(policy, rows) for _ in range(steps)]
        plain = 0.03 * float(np.interp(rows, TOKENS, self.times))
        return plain * sum(tokens for _, tokens, _ in taken) / sum(seconds for *_, seconds in taken)


def best_fixed(rows, *machine, **options):
    plans = [StepPlan(*sizes) for sizes in ((1, 1), (3, 3), (7, 4), (7, 7), (15, 12))]
    return max([1.0, *(Machine(*machine, **options).rate(DraftPolicy(plan), 100, rows) for plan in plans)])


@pytest.mark.parametrize(
    ("times", "children", "options", "rows", "least"),
    [
        (AVX2, COPIES, {}, 1, 0.93),
        (VNNI, COPIES, {}, 1, 0.93),
        (FLAT, GOOD, {}, 1, 0.85),
        (VNNI, GOOD, {"level": 0.08}, 1, 0.85),
        (FLAT, GOOD, {"level": 0.08}, 1, 0.78),
        (FLAT, GOOD, {}, 4, 0.88),
        (AVX2, POOR, {}, 1, 0.95),
        (VNNI, POOR, {"level": 0.25}, 1, 0.9),
        (AVX2, GOOD, {}, 4, 0.95),
        (VNNI, POOR, {"claimed": (0.9, 0.05)}, 1, 0.88),
    ],
)
def test_adaptive_decoding_is_nearly_as_fast_as_the_best_fixed_plan(times, children, options, rows, least):
    """From the first step on, although the prior is wrong on each machine."""
    rate = Machine(times, children, **options).rate(AdaptivePolicy(free_tokens=8.0), 300, rows)
    assert rate > least * best_fixed(rows, times, children, **options)


def test_the_first_step_drafts():
    policy, machine = AdaptivePolicy(), Machine(VNNI, COPIES)
    assert [machine.step(policy)[0].nodes > 0 for _ in range(3)] == [True, True, False]
    machine.rate(policy, 300)
    assert sum(not machine.step(policy)[0].nodes for _ in range(130)) == 2  # the unit of time is measured again


@pytest.mark.parametrize("times", [AVX2, FLAT])
def test_useless_drafts_cost_little_and_are_tried_again(times):
    policy, useless = AdaptivePolicy(), Machine(times, (0.01,), claimed=(0.5,), level=0.1)
    rates = []
    for _ in range(4):
        policy.begin(1.0)
        rates.append(useless.rate(policy, 128))
    assert rates[0] > 0.88
    assert fmean(rates[1:]) > 0.96
    useful = Machine(times, COPIES)
    policy.begin(1.0)
    useful.rate(policy, 200)
    assert useful.rate(policy, 100) > 0.9 * best_fixed(1, times, COPIES)


def test_drafting_survives_load_on_the_machine():
    load = {at + delay: factor for at in (40, 180) for delay, factor in ((0, 3.0), (50, 1.0), (70, 6.0), (71, 1.0))}
    policy, machine = AdaptivePolicy(), Machine(VNNI, COPIES, load=load)
    machine.rate(policy, 300)
    assert machine.rate(policy, 100) > 0.9 * best_fixed(1, VNNI, COPIES)


def test_learned_times_are_those_of_the_machine():
    model = StepTimeModel(free_tokens=16.0)
    for step in range(300):
        load = 2.0 if 100 <= step < 150 else 1.0
        tokens = (1, 2, 5, 8)[step % 4]
        surprise = model.add(tokens, 0.03 * load * float(np.interp(tokens, TOKENS, AVX2)))
        assert surprise == (step in (100, 150)) or step < 9
    assert model.seconds == pytest.approx(0.03, rel=0.05)
    assert model.ratios([1, 2, 4, 8]).tolist() == pytest.approx(AVX2[:4], rel=0.1)
    assert model.ratios([2, 8])[1] == pytest.approx(4.0 / 1.36, rel=0.1)
    assert model.ratios([1, 64])[1] > model.ratios([1, 64], optimism=1.0)[1] >= 1.0


def test_learned_times_are_those_of_a_kalman_filter():
    """With whole vectors and matrices."""
    model, random = StepTimeModel(free_tokens=5.0), np.random.default_rng(0)
    state, covariance = model._state.copy(), model._covariance.copy()
    before = 0
    for step, tokens in enumerate([3, 1, 1, 2, 7, 64, 1, 5000, 1, 12]):
        seconds = float(np.exp(random.normal(-4, 0.3 + (step == 6))))
        read = np.array([max(0.0, 1.0 - abs(knot - min(np.log2(tokens), 12))) for knot in range(13)])
        if tokens == 5000:  # beyond the last knot
            read[-2:] = 12 - np.log2(tokens), np.log2(tokens) - 11
        read[0] = 1.0
        residual = np.log(seconds) - read @ state
        last, before = before, tokens
        surprise = model.add(tokens, seconds)
        if step == 0:
            state[0] += residual
            covariance[0, 0] = 1.0
            continue
        covariance += model._drift
        if surprise:
            covariance[0, 0] += residual**2
            covariance += residual**2 * model._doubt * (abs(np.log2(tokens / last)) >= 1)
        column = covariance @ read
        state += column * residual / (read @ column + 0.08**2)
        covariance -= np.outer(column, column) / (read @ column + 0.08**2)
        np.testing.assert_allclose(model._state, state)
        np.testing.assert_allclose(model._covariance, covariance, atol=1e-12)
        assert model.ratio(7, 2) == pytest.approx(float(model.ratios([2, 7])[1]))
        assert model.ratio(6, 6) == 1.0


def test_the_price_of_a_level_is_that_of_more_levels():
    model = DraftTimeModel()
    assert (model.slope, model(3)) == (0.0, 0.0)
    model.add(1, 0.6)
    assert model.slope == pytest.approx(0.3)  # half of the draft, before levels have varied
    for step in range(100):
        model.add(1 + 3 * (step % 2), 0.6 + 0.05 * (1 + 3 * (step % 2)))
    assert model.slope == pytest.approx(0.05, abs=0.02)
    assert model(6) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(("nodes", "chain", "kept"), [(3, False, 4), (9, False, 6), (9, True, 4), (0, False, 1)])
def test_fixed_plans(nodes, chain, kept):
    tree = build_tree(torch.tensor([7]), [([1, 2, 3, 4, 5], [0, 0, 1, 3, 2])], [[0.9, 0.5, 0.4, 0.3, 0.2]])
    policy = DraftPolicy(StepPlan(nodes, 6, chain))
    assert policy.prune(policy.plan(1, 99), tree).nodes == kept
    assert [policy.plan(1, remaining).depth for remaining in (0, 2, 6, 50)] == [0, 2, 6, 6]
    assert policy.plan(1, 0).nodes == 0
    static = DraftPolicy(StepPlan(nodes, 6, chain), static_shapes=True)
    assert [static.plan(1, remaining).depth for remaining in (0, 2)] == [0, 6]
    assert static.prune(static.plan(1, 2), tree).nodes == min(nodes + 1, 6)


@pytest.mark.parametrize("policy", [DraftPolicy(StepPlan(2)), AdaptivePolicy()])
def test_sampled_trees_and_trees_without_probabilities_are_kept_whole(policy):
    rows = [([5] * 70, list(range(70)))]
    unscored, sampled = build_tree(torch.tensor([1]), rows), build_tree(torch.tensor([1]), rows, [[0.01] * 70])
    sampled.draft_probs = torch.full((1, 71, 9), 1 / 9)
    plan = policy.plan(1, 100)
    assert policy.prune(plan, unscored) is unscored
    assert policy.prune(plan, sampled) is sampled
    assert policy.prune(plan, build_tree(torch.tensor([1]), rows, [[0.01] * 70])).nodes < 71


def test_plain_steps_verify_tokens_that_a_grammar_forces():
    policy = AdaptivePolicy(plans=[StepPlan(64, 16, adaptive=True)])
    for _ in range(30):
        policy.observe(StepPlan(64, adaptive=True), TokenTree.root(torch.tensor([1])), [[0]], StepTimes(0.1, 0.1))
    plan = policy.plan(1, 100)
    assert (plan.nodes, plan.depth) == (0, 16)
    forced = build_tree(torch.tensor([1]), [([5] * 3, [0, 1, 2])], [[1.0] * 3])
    assert policy.prune(plan, forced).nodes == 4


def test_finished_rows_teach_nothing():
    policies = AdaptivePolicy(), AdaptivePolicy()
    for policy, rows in zip(policies, ([[0, 1, 2]], [[0, 1, 2], []]), strict=True):
        for _ in range(40):
            plan = policy.plan(len(rows), 100)
            roots, drafts = torch.zeros(len(rows), dtype=torch.long), [([5, 5], [0, 1])] * len(rows)
            tree = build_tree(roots, drafts, [[0.4, 0.1]] * len(rows))
            policy.observe(plan, tree, rows, StepTimes(0.001, 0.1))
    trees = [build_tree(torch.tensor([1]), [([5] * 4, [0, 1, 2, 3])], [[0.4, 0.1, 0.1, 0.1]]) for _ in policies]
    sizes = [policy.prune(StepPlan(9, adaptive=True), tree).nodes for policy, tree in zip(policies, trees, strict=True)]
    assert sizes[0] == sizes[1] == 5


def test_arms_are_explored_in_runs_within_the_credit():
    """The most promising arm, the first of equal ones; plain steps come first."""
    policy = AdaptivePolicy(True, [StepPlan(nodes, 3, adaptive=True) for nodes in (9, 7, 5, 3)])
    rates, sizes = policy._of(1), lambda count: [policy.plan(1, 99).nodes for _ in range(count)]
    policy._interval = 50
    assert sizes(2) == [9, 9]  # nothing else before the best arm is tried
    for _ in range(30):
        rates[0].add(2.0, 1.0)
    assert sizes(2) == [7, 7]
    rates[2].add(3.0, 1.0)
    assert sizes(3) == [7, 7, 5]
    policy._since_plain = 50
    assert sizes(1) == [0]
    policy._since_plain = 49
    rates[3].add(4.0, 1.0)
    assert sizes(1) == [5]
    policy._exploration.credit = -1.0
    assert sizes(1) == [9]
    policy._exploration.credit = 2.0
    assert sizes(1) == [3]  # a new run
    for rate in rates[1:]:
        for _ in range(60):
            rate.add(1.0, 1.0)
    assert sizes(5) == [3, 3, 3, 9, 9]
    for rate in rates:  # all slower than plain decoding, some perhaps not
        for _ in range(90):
            rate.add(0.5, 1.0)
    policy._since_plain = 50
    assert sizes(2) == [0, 0]
    rates[2].age(0.05)
    assert sizes(5) == [5] * 5


@pytest.mark.parametrize("static", [False, True])
def test_what_a_step_teaches(static):
    """Of two rows, one has ended. With static shapes, a plan learns from the trees of which its own are parts."""
    sizes = (7, 3), (3, 2), (3, 5), (9, 3), (3, 2, True)
    policy = AdaptivePolicy(static, [StepPlan(*size, adaptive=True) for size in (sizes if static else sizes[::4])])
    root, plain = TokenTree.root(torch.tensor([1, 1])), replace(policy._plans[0], nodes=0)
    for step in range(1, 20):
        policy._since_plain = 5
        policy.observe(plain, root, [[0], [0]], StepTimes(0.0, 0.02, 0.01))
        assert (policy._interval, policy._since_plain) == (min(2 ** (1 + step), 64), 0)
    assert policy._time.seconds * policy._time.ratio(2, 1) == pytest.approx(0.03, rel=0.01)
    rates, levels, accepted = policy._of(2), DraftTimeModel(), Acceptance()
    probs, path = [0.9, 0.6, 0.6, 0.2, 0.2, 0.1, 0.1], [0, 1, 3, 5]
    tree = build_tree(torch.tensor([1, 1]), [([5] * 7, [0, 1, 1, 3, 3, 0, 0])] * 2, [probs] * 2)
    first, *steps = [(policy._plans[0], tree, *times) for times in ((0.01, 0.05), (0.0, 0.05), (0.01, 5.0))]
    drafted, unused = 0, (plain, root, 0.0, 0.02)
    for plan, tree, draft, verify in (first, unused, *steps, unused):
        best, rate = policy._best(rates)
        policy._exploration.credit, before = 1.0, [one._sums.copy() for one in rates]
        policy.observe(plan, tree, [path[: tree.nodes], []], StepTimes(draft, verify, 0.01, 4))
        unit = policy._time.seconds * policy._time.ratio(2, 1)
        time = min((verify + 0.01) / unit, 3.0 * policy._time.ratio(2 * tree.nodes, 2)) + draft / unit
        loss, expected = time * (1.0 - 1.0 / rate), [0.995 * sums for sums in before]
        if plan.nodes:
            loss, learned = 0.0 if best == 0 else time - 4 / rate, {0: (4, time)}
            if draft:
                levels.add(3 if static else 4, draft / unit)
            if static:
                learned[1] = 3, policy._time.ratio(2 * 4, 2) + levels(2)
            for arm, (tokens, seconds) in learned.items():
                expected[arm] = 0.98 * expected[arm] + np.array(
                    (tokens, seconds, tokens**2, tokens * seconds, seconds**2)
                )
            for node, prob in enumerate(() if static else tree.path_probs[0], start=1):
                accepted.add(prob, node in path)
        np.testing.assert_allclose([one._sums for one in rates], expected)
        assert policy._exploration.credit == pytest.approx(min(1.0 + 0.02 * time - loss, 2.0))
        assert policy._time._last == 2 * tree.nodes
        np.testing.assert_allclose(policy._draft_time[False]._sums, levels._sums)
        assert vars(policy._acceptance[False]) == vars(accepted)
        drafted = drafted + 1 if plan.nodes else 0
        assert policy._since_plain == drafted
    assert policy._interval == 2  # the load has changed
    policy.observe(plain, build_tree(torch.tensor([1, 1]), [([5], [0])] * 2), [[0, 1], []], StepTimes(0.0, 0.04))
    assert policy._interval == 2  # of tokens that a grammar forces, nothing about plain steps


@pytest.mark.parametrize(
    ("times", "accepted", "best"),
    [(FLAT, [0, 1, 9, 12], 15), (VNNI, [0, 1, 4, 6], 7), (AVX2, [0], 0), (VNNI, [0, 1, 2, 3], 3)],
)
def test_static_shapes_are_chosen_before_the_draft(times, accepted, best):
    """``accepted``: nodes of the largest tree; a chain accepts as many of its nodes."""
    policy, machine, sizes = AdaptivePolicy(True, STATIC, 64.0), Machine(times, ()), []
    for _ in range(150):
        plan = policy.plan(1, 1000)
        sizes.append(plan.nodes)
        tree = build_tree(torch.tensor([1]), [([5] * plan.nodes, [0] * plan.nodes)])
        path = [node for node in accepted if node <= plan.nodes]
        policy.observe(plan, tree, [path], StepTimes(0.002 * plan.nodes**0.5, machine.seconds(1 + plan.nodes)))
    assert sizes[0] == 15
    assert sizes[-60:].count(best) > 30


def test_exploration_loses_two_per_cent():
    exploration, lost = Exploration(), 0.0
    for _ in range(2000):
        loss = 0.4 if exploration.allowed else 0.0
        lost += loss
        exploration.elapse(1.0, loss)
    assert lost == pytest.approx(0.02 * 2000 + 2.0, abs=1.0)
    exploration.credit = 0.0
    exploration.renew(0.5)
    assert exploration.credit == 0.25


@pytest.mark.parametrize(("gain", "drafts"), [(-0.5, (1, 20)), (0.1, (200, 200))])
def test_a_losing_drafter_pauses(gain, drafts):
    payoff, drafted = Payoff(), 0
    for _ in range(200):
        if not payoff.rests():
            payoff.add(gain)
            drafted += 1
    least, most = drafts
    assert least <= drafted <= most
    for _ in range(60):
        if not payoff.rests():
            payoff.add(2.0)
    assert not payoff.rests()


def test_ranks_of_a_sharded_target_have_a_fixed_policy():
    """Their clocks differ, and so would their plans."""
    target = TransformersTarget(byte_model())
    assert isinstance(Speculation(target, Ngram()).adaptive, AdaptivePolicy)
    with alone(target.model):
        assert not isinstance(Speculation(target, Ngram()).adaptive, AdaptivePolicy)
