"""Tests of sampled answers, and the smallest difference of distributions that they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from math import exp, lgamma, log, sqrt
from typing import TypeVar

import torch

T = TypeVar("T", bound=Hashable)

ALPHA = 1e-4
"""Probability that a test calls answers of one distribution different."""

POWER = 0.95
_LEAST = 5.0  # expected count of an outcome; rarer ones are counted together
_PERMUTATIONS = 20_000


def against_probabilities(counts: Mapping[T, int], probs: Mapping[T, float]) -> tuple[float, float]:
    """Pearson's chi-square test of counts.

    Args:
        probs: of all outcomes.

    Returns:
        The p-value, 0 if an outcome was seen that cannot occur; and the total variation distance that is found with a
        probability of at least ``POWER``, whatever the other distribution.
    """
    drawn = sum(counts.values())
    if any(not probs.get(outcome) for outcome in counts):
        return 0.0, 0.0
    rare, cells = [0.0, 0.0], []
    for outcome, probability in probs.items():
        expected, found = drawn * probability, float(counts.get(outcome, 0))
        if expected < _LEAST:
            rare = [rare[0] + expected, rare[1] + found]
        else:
            cells.append((expected, found))
    cells.sort()
    if cells and rare[0] < _LEAST:
        cells[0] = (cells[0][0] + rare[0], cells[0][1] + rare[1])
    else:
        cells.append((rare[0], rare[1]))
    if len(cells) < 2:
        return 1.0, 1.0
    statistic = sum((found - expected) ** 2 / expected for expected, found in cells)
    free = len(cells) - 1
    # For cells of probabilities p and q, n sum (p - q)^2 / p >= n (sum |p - q|)^2 (Cauchy and Schwarz).
    return _upper(free, statistic), sqrt(_noncentrality(free) / drawn) / 2


def two_samples(first: Sequence[Hashable], second: Sequence[Hashable], seed: int = 0) -> tuple[float, float]:
    """Permutation test of two samples of equal size, by the chi-square statistic of their counts.

    Returns:
        As for ``against_probabilities``; the distance is approximate, and that of outcomes of which rare ones are
        counted together.
    """
    both = Counter([*first, *second])
    common = [outcome for outcome, count in both.items() if count >= 2 * _LEAST]
    cell = {outcome: place for place, outcome in enumerate(common)}
    cells = torch.tensor([cell.get(outcome, len(common)) for outcome in (*first, *second)], dtype=torch.long)
    one_hot = torch.nn.functional.one_hot(cells, len(common) + 1).float()
    totals = one_hot.sum(0)
    generator = torch.Generator().manual_seed(seed)

    def statistic(members: torch.Tensor) -> torch.Tensor:
        """Of samples whose members are marked by 1: (samples, members) to (samples,)."""
        counts = members @ one_hot
        return ((2 * counts - totals) ** 2 / totals.clamp(min=1)).sum(-1)

    own = statistic(torch.tensor([[1.0] * len(first) + [0.0] * len(second)], dtype=torch.float32))
    as_large = 0
    for _ in range(_PERMUTATIONS // 1000):
        order = torch.rand(1000, len(cells), dtype=torch.float32, generator=generator).argsort(-1)
        as_large += int((statistic((order < len(first)).float()) >= own - 1e-4).sum())
    free = max(int((totals > 0).sum()) - 1, 1)
    return (1 + as_large) / (1 + _PERMUTATIONS), min(sqrt(_noncentrality(free) / (2 * len(first))), 1.0)


def _upper(free: float, value: float) -> float:
    """Probability that a chi-square variable of so many degrees of freedom is larger."""
    shape, half = (torch.tensor(x / 2, dtype=torch.double) for x in (free, value))
    return float(torch.special.gammaincc(shape, half))


@cache
def _noncentrality(free: int) -> float:
    """That of the chi-square distribution for which a test at ``ALPHA`` has ``POWER``."""
    critical = _root(lambda value: ALPHA - _upper(free, value))
    return _root(lambda value: _power(free, critical, value) - POWER)


def _power(free: int, critical: float, noncentrality: float) -> float:
    """Probability that a noncentral chi-square variable exceeds a value: a mixture over a Poisson variable."""
    half = noncentrality / 2
    return sum(
        exp(number * log(half) - half - lgamma(number + 1)) * _upper(free + 2 * number, critical)
        for number in range(int(half + 12 * sqrt(half)) + 20)
    )


def _root(rises: Callable[[float], float]) -> float:
    low, high = 1e-6, 1e4
    for _ in range(50):
        middle = sqrt(low * high)
        low, high = (low, middle) if rises(middle) > 0 else (middle, high)
    return high
