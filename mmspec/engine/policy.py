"""Drafting policy: whether to draft, and number, depth and shape of draft tokens per step."""

from __future__ import annotations

from mmspec.core.plan import StepPlan, StepTimes
from mmspec.core.tree import TokenTree

STEADY_PLANS = (
    *(StepPlan(length, length, True, adaptive=True) for length in (3, 7)),
    *(StepPlan(nodes, depth, adaptive=True) for nodes in (7, 15, 31, 63) for depth in (4, 12)),
)
"""Plans with static shapes, each with its own captured graphs. A chain and the root fill a padded pass."""

_DEFAULT = StepPlan()


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
        if remaining <= 0 or plan.nodes == 0:
            return StepPlan(0, 0 if remaining <= 0 else plan.depth, adaptive=plan.adaptive)
        if self._static_shapes or remaining >= plan.depth:
            return plan
        return StepPlan(plan.nodes, remaining, plan.chain, plan.least_gain, plan.adaptive)


class AdaptivePolicy(DraftPolicy):
    """Maximises tokens per second."""
