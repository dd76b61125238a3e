"""Policies in simulated decoding: times and acceptance are given, rates are compared with the best fixed plan."""

import random
from math import exp
from statistics import fmean

import numpy as np
import pytest
import torch

from mmspec.core.payoff import Exploration, Payoff
from mmspec.core.plan import StepPlan, StepTimes
from mmspec.core.tree import TokenTree, build_tree
from mmspec.drafters.growth import best_first
from mmspec.engine.policy import AdaptivePolicy, DraftPolicy, DraftTimeModel, StepTimeModel

TOKENS = 1, 2, 4, 8, 16, 32, 64, 512
AVX2 = 1, 1.36, 2.07, 4.0, 7.9, 15.8, 31.6, 253
VNNI = 1, 1.02, 1.1, 1.4, 2.68, 5.3, 10.6, 85
FLAT = 1, 1.0, 1.02, 1.05, 1.15, 1.3, 1.7, 7
COPIES, GOOD, POOR = (0.9,), (0.6, 0.15, 0.05), (0.06, 0.03)


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
            path = self.rng.choices([*range(len(self.children)), None], [*self.children, 1 - sum(self.children)], k=depth)
            children = lambda level: [(token, share, level + 1) for token, share in claimed.items()]  # noqa: E731
            tokens, parents, _ = draft = best_first(0, children, depth, plan.nodes, plan.floor)
            right = [(0, 0)]  # nodes of the path, and their levels
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
                if parent == right[-1][0] and token == path[right[-1][1]]:
                    right.append((node, right[-1][1] + 1))
            drafts.append(draft)
            chosen.append([node for node, _ in right])
        tree = build_tree(torch.zeros(rows, dtype=torch.long), [row[:2] for row in drafts], [row[2] for row in drafts])
        tree.levels = depth
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
    """Rate of the best fixed tree, or of plain decoding."""
    sizes = [DraftPolicy(StepPlan(nodes, depth)) for nodes in (1, 2, 4, 7, 15) for depth in (1, 3, 12)]
    return max([1.0, *(Machine(*machine, **options).rate(policy, 150, rows) for policy in sizes)])


@pytest.mark.parametrize(
    ("times", "children", "options", "rows", "least"),
    [
        (AVX2, COPIES, {}, 1, 0.93),
        (VNNI, COPIES, {}, 1, 0.93),
        (FLAT, COPIES, {}, 1, 0.93),
        (VNNI, GOOD, {}, 1, 0.93),
        (VNNI, GOOD, {"level": 0.08}, 1, 0.93),
        (FLAT, GOOD, {"level": 0.08}, 1, 0.93),
        (FLAT, GOOD, {}, 8, 0.93),
        (AVX2, POOR, {}, 1, 0.95),
        (VNNI, POOR, {"level": 0.25}, 1, 0.93),
        (AVX2, GOOD, {}, 8, 0.95),
        (VNNI, POOR, {"claimed": (0.9,) * 2}, 1, 0.93),
    ],
)
@pytest.mark.parametrize("free_tokens", [2.0, 16.0])
def test_adaptive_decoding_is_nearly_as_fast_as_the_best_fixed_plan(times, children, options, rows, least, free_tokens):
    """From the first step on, whatever the prior."""
    policy = AdaptivePolicy(free_tokens=free_tokens)
    rate = Machine(times, children, **options).rate(policy, 400, rows)
    assert rate > least * best_fixed(rows, times, children, **options)
