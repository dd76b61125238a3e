"""Draft plan of one decode step, the step's times, and the cost of searching for a better choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """Shape of the draft of one step, chosen before drafting.

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


_SHARE = 0.02  # share of the decode time that exploration may lose
_MOST = 2.0  # maximum credit, in plain decode steps
_RESUME = 0.5  # credit that starts another exploration
_GAIN_DECAY = 0.05  # weight of a step in the mean gain


class Exploration:
    """Time that exploration may still lose, in plain decode steps.

    The one rule of exploration: steps of a choice that is not expected to be the fastest may lose 2 % of the decode
    time in total. Credit accumulates up to two steps; exploration starts with half a step and ends without credit.
    """

    def __init__(self) -> None:
        self.credit = _MOST
        self._running = True

    def elapse(self, time: float, loss: float = 0.0) -> None:
        """Add a step's time, and the time it lost to the best choice; a negative loss is a gain."""
        self.credit = min(self.credit + _SHARE * time - loss, _MOST)

    def renew(self, share: float) -> None:
        """Allow an exploration for new requests, which make up ``share`` of the batch."""
        self.credit = max(self.credit, _RESUME * share)

    @property
    def allowed(self) -> bool:
        self._running = self.credit > 0.0 if self._running else self.credit >= _RESUME
        return self._running


class Payoff:
    """Pauses a drafter after a loss: it drafts if its recent mean gain is positive, or as exploration.

    The gain of a draft is its tokens minus its time, both in units of plain decode steps.
    """

    def __init__(self) -> None:
        self._exploration, self._mean = Exploration(), 0.0

    def rests(self) -> bool:
        """Whether the drafter is paused in this step; called once per step."""
        if self._mean >= 0.0 or self._exploration.allowed:
            return False
        self._exploration.elapse(1.0)
        return True

    def add(self, gain: float) -> None:
        self._mean += _GAIN_DECAY * (gain - self._mean)
        self._exploration.elapse(1.0, -gain)
