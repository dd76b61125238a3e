"""A line through the times of decode steps."""

from __future__ import annotations

_PRIOR = 2.0  # weight of the slope that is expected
_DECAY = 0.98  # of differences, per difference
_FADE = 0.05  # weight of a step in ``fixed``
_OUTLIER = 1.25  # times the expected time, as which slower steps count: a busy machine shows nothing


class Line:
    """``base + fixed + slope * x``, a time that grows with a tree, of which ``base`` is known.

    The slope comes from the differences of successive steps, which other load slows alike.

    Args:
        least: of ``fixed``; above the negative of the smallest base.
    """

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self.fixed = self.slope = 0.0
        self._last: tuple[float, float] | None = None
        self._spread = self._common = 0.0
        self._weight = 1.0

    def add(self, x: float, time: float, base: float = 0.0, guess: float = 0.0) -> None:
        """Add a step.

        Args:
            guess: the slope, as far as steps have not shown it.
        """
        if self._weight < 1.0:
            time = min(time, _OUTLIER * (base + self.fixed + self.slope * x))
        y = time - base
        if self._last is not None and (more := x - self._last[0]):
            self._spread = _DECAY * self._spread + more * more
            self._common = _DECAY * self._common + more * (y - self._last[1])
        self.slope = max(self._common + _PRIOR * guess, 0.0) / (self._spread + _PRIOR)
        self._last = x, y
        self.fixed = max(self.fixed + self._weight * (y - self.slope * x - self.fixed), self._least)
        self._weight = max(_FADE, self._weight / (1.0 + self._weight))

    def interrupt(self) -> None:
        """The next step differs from the last one by more than ``x``."""
        self._last = None
