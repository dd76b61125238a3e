"""Budgets from measured verify times, and measurements that turn out to be wrong."""

from __future__ import annotations

from collections import deque
from statistics import median

from mmspec.core.budget import Budget

_OVERESTIMATE = 1.5  # a calibration that so many times the time of real passes is wrong
_LATELY = 32  # verify passes that show it


class Drift:
    """Whether verify passes are far faster than their calibration, which other load disturbed then.

    Passes that are slower show nothing: prefixes grow, and machines are busy.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_LATELY)

    def add(self, seconds: float, calibrated: float) -> None:
        self._ratios.append(seconds / calibrated)

    @property
    def overestimated(self) -> bool:
        return len(self._ratios) == _LATELY and median(self._ratios) * _OVERESTIMATE < 1.0


class MeasuredBudget(Budget):
    """A budget from the measured cost of verify passes.

    Attributes:
        drift: verify passes against their calibration; None once the calibration has proved wrong.
    """

    drift: Drift | None = None
