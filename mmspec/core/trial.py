"""Whether something that costs time pays: it is tried, rests after losses beyond chance, and is tried anew."""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import fmean

_LATELY = 32  # steps whose gain is averaged
_FEWEST = 12  # steps that may show a loss
_STAKE = 3.0  # what fewer may lose
_HOPE = 1.0  # gain of another step: some drafts are accepted, although none were
_REST = 28, 84  # fewest and most steps of a rest
_CHANCE = 2.0  # standard errors that a mean loss must exceed
_LOSS = 0.03  # share of the time that the steps between rests may lose


class Trial:
    """Steps of something, with what each has gained, in plain decode steps of time or in the tokens of one.

    While the mean gain of recent steps is below zero by more than chance, it rests. The more it loses, the longer it
    rests.
    """

    def __init__(self) -> None:
        self._gains: deque[float] = deque(maxlen=_LATELY)
        self.rest = 0

    def rests(self) -> bool:
        """Whether to rest in this step; called once per step."""
        if not self.rest and self._loses():
            fewest, most = _REST
            self.rest = min(max(fewest, int(_FEWEST * -fmean(self._gains) / _LOSS)), most)
            self._gains.clear()
        if not self.rest:
            return False
        self.rest -= 1
        return True

    def add(self, gain: float) -> None:
        """Add a step; one that was very slow tells little."""
        self._gains.append(max(gain, 1 - _STAKE))

    def restart(self) -> None:
        """Forget all steps."""
        self._gains.clear()
        self.rest = 0

    def _loses(self) -> bool:
        if len(self._gains) < _FEWEST:
            return sum(self._gains) < -_STAKE
        gains = [*self._gains, _HOPE]
        mean = fmean(gains)  # statistics.stdev takes fifteen times as long, in every step
        error = sqrt(fmean((gain - mean) ** 2 for gain in gains) / (len(gains) - 1))
        return mean + _CHANCE * error < 0.0
