"""Whether drafting pays."""

from __future__ import annotations

from collections import deque
from math import sqrt
from operator import mul
from statistics import fmean

_RECENT_STEPS = 32  # window of the mean gain
_FEWEST_STEPS = 12  # minimum steps for the significance test of a loss
_STAKE = 3.0  # maximum total loss in fewer steps
_HOPE = 1.0  # prior: the gain of one additional step
_REST = 28, 84  # minimum and maximum cooldown, in steps
_STANDARD_ERRORS = 2.0  # threshold of a significant mean loss
_LOSS_SHARE = 0.03  # maximum share of time lost to draft steps between cooldowns


class DraftingPayoff:
    """Decides whether drafting pays: drafting pauses for a cooldown after a significant loss, then is tried again.

    The gain of a draft step is its tokens minus its time, both in units of plain decode steps or of tokens. A mean gain
    of recent steps that is significantly below zero starts a cooldown, which is longer for larger losses.
    """

    def __init__(self) -> None:
        self._gains: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.rest = 0

    def rests(self) -> bool:
        """Whether drafting is paused in this step; called once per step."""
        if not self.rest and self._loses():
            fewest, most = _REST
            self.rest = min(max(fewest, int(_FEWEST_STEPS * -fmean(self._gains) / _LOSS_SHARE)), most)
            self._gains.clear()
        if not self.rest:
            return False
        self.rest -= 1
        return True

    def add(self, gain: float) -> None:
        """Add a draft step; the loss of a single slow step is limited."""
        self._gains.append(max(gain, 1 - _STAKE))

    def restart(self) -> None:
        """Reset all statistics."""
        self._gains.clear()
        self.rest = 0

    def _loses(self) -> bool:
        if len(self._gains) < _FEWEST_STEPS:
            return sum(self._gains) < -_STAKE
        count = len(self._gains) + 1  # including the prior; statistics.stdev would be a hundred times slower
        mean = (sum(self._gains) + _HOPE) / count
        variance = (sum(map(mul, self._gains, self._gains)) + _HOPE**2) / count - mean**2
        return mean + _STANDARD_ERRORS * sqrt(max(variance, 0.0) / (count - 1)) < 0.0
