"""Statistical tests of sampled answers, with the smallest detectable difference of distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from math import erfc, exp, lgamma, log, sqrt
from statistics import NormalDist
from typing import TypeVar

import torch

T = TypeVar("T", bound=Hashable)

ALPHA = 1e-4  # significance level: probability that a test rejects answers of equal distributions
POWER = 0.95
COLD = 0.9  # temperature in place of 1 that a test detects with probability `POWER`
_LEAST = 5.0  # minimum expected count of an outcome; rarer outcomes are pooled


def against_probabilities(counts: Mapping[T, int], probs: Mapping[T, float], samples: int = 1) -> tuple[float, float]:
    """Pearson's chi-square test of counts.

    Args:
        probs: probabilities of all outcomes; with ``samples`` 2, mean shares over this sample and another sample.

    Returns:
        The p-value, 0 if an impossible outcome was observed; and the total variation distance that is detected with
        probability at least ``POWER`` for any alternative distribution.
    """
    drawn = sum(counts.values())
    if any(not probs.get(outcome) for outcome in counts):
        return 0.0, 0.0
    cells = sorted((drawn * share, float(counts.get(outcome, 0))) for outcome, share in probs.items())
    while len(cells) > 1 and min(cells[0][0], cells[1][0]) < _LEAST:
        cells[:2] = [(cells[0][0] + cells[1][0], cells[0][1] + cells[1][1])]
    if len(cells) < 2:
        return 1.0, 1.0
    statistic = samples * sum((found - expected) ** 2 / expected for expected, found in cells)
    free = len(cells) - 1
    # For cells of probabilities p and q, n sum (p - q)^2 / p >= n (sum |p - q|)^2 (Cauchy and Schwarz).
    return _upper(free, statistic), min(sqrt(_noncentrality(free) * samples / drawn) / 2, 1.0)


def two_samples(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[float, float]:
    """Chi-square test of two samples of equal size: ``against_probabilities`` with pooled shares as probabilities."""
    probs = {outcome: count / 2 / len(first) for outcome, count in Counter([*first, *second]).items()}
    return against_probabilities(Counter(first), probs, 2)


def against_logprobs(tokens: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, float]:
    """Likelihood ratio test of sampled tokens, temperature 1 against ``COLD``: log probabilities minus their means.

    Args:
        tokens: for each token, its log probability at temperature 1 and the log probabilities of all candidates, whose
            number is equal for all tokens.

    Returns:
        The p-value, and the power against the same number of tokens sampled at ``COLD``.
    """
    logits = torch.tensor([candidates for _, candidates in tokens], dtype=torch.double).clamp(min=-1e3)
    shares = torch.stack([logits.softmax(-1), (logits / COLD).softmax(-1)])
    means = (shares * logits).sum(-1)
    total, cold = means.sum(-1).tolist()
    deviation, other = (shares * (logits - means[..., None]) ** 2).sum((-2, -1)).sqrt().tolist()
    if not deviation or not other:
        return 1.0, 0.0
    excess = sum(chosen for chosen, _ in tokens) - total
    critical = NormalDist(0, deviation).inv_cdf(1 - ALPHA / 2)
    return erfc(abs(excess) / deviation / sqrt(2)), 1 - NormalDist(cold - total, other).cdf(critical)


def _upper(free: float, value: float) -> float:
    """Upper tail probability of the chi-square distribution with ``free`` degrees of freedom."""
    shape, half = (torch.tensor(x / 2, dtype=torch.double) for x in (free, value))
    return float(torch.special.gammaincc(shape, half))


@cache
def _noncentrality(free: int) -> float:
    """Noncentrality at which a chi-square test with level ``ALPHA`` has power ``POWER``."""
    critical = _root(lambda value: ALPHA - _upper(free, value))
    return _root(lambda value: _power(free, critical, value) - POWER)


def _power(free: int, critical: float, noncentrality: float) -> float:
    """Upper tail probability of the noncentral chi-square distribution, as a Poisson mixture."""
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
