"""Draft plan of one decode step, and the step's times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """What a drafter drafts in one step, chosen before the draft.

    Attributes:
        nodes: maximum drafted nodes per row; 0 is a plain decode step.
        depth: maximum tree depth.
        chain: draft chains, one child per node.
        least_gain: minimum expected tokens per row that another level of the tree must add.
        adaptive: whether sizes follow measured times; unions then also pause members that do not pay.
        floor: minimum path probability of a node.
    """

    nodes: int = 16
    depth: int = 12
    chain: bool = False
    least_gain: float = 0.0
    adaptive: bool = False
    floor: float = 0.002

    @property
    def most_nodes(self) -> int:
        """Maximum nodes per row, with the tokens that a grammar forces: adaptive plain steps may verify some."""
        return self.nodes or (16 if self.adaptive else 0)


@dataclass(frozen=True)
class StepTimes:
    """Times of a decode step.

    Attributes:
        draft, verify, commit: seconds of each phase; ``draft`` is 0 if the drafter did not run.
        levels: ``TokenTree.levels`` of the draft.
    """

    draft: float
    verify: float
    commit: float = 0.0
    levels: int = 1

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.commit
