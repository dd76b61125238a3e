"""Whether acceptance has fallen since a drafter's weights were replaced."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, variance

REQUESTS = 16
"""Requests that are compared, before and after."""


class AcceptanceWatch:
    """Acceptance lengths of requests, before and since the last replacement."""

    def __init__(self) -> None:
        self._before: list[float] = []
        self._since: list[float] = []

    def add(self, acceptance_length: float) -> None:
        self._since.append(acceptance_length)

    @property
    def complete(self) -> bool:
        """Whether enough requests have ended since the last replacement."""
        return len(self._since) >= REQUESTS

    @property
    def fallen(self) -> bool:
        """Whether acceptance is lower than before by more than its standard error."""
        if not self._before:
            return False
        error = sqrt(variance(self._before) / len(self._before) + variance(self._since) / len(self._since))
        return fmean(self._since) + error < fmean(self._before)

    def replaced(self, kept: bool) -> None:
        """Begin anew after a replacement; ``kept`` says whether that of the last comparison stays the reference."""
        if kept or not self._before:
            self._before = self._since[-REQUESTS:]
        self._since = []
