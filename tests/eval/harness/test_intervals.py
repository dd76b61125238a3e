"""Intervals against exact distributions and the definition."""

import math

import pytest

from mmspec.eval.harness.intervals import median_interval


@pytest.mark.parametrize("count", [29, 43, 111])
def test_the_interval_ends_are_the_exact_percentiles(count):
    """The k-th of n values is at or above the median of a resample with the probability that at least (n + 1) / 2 of n
    draws are among the k smallest: the ends of a 95 % interval are where this passes 2.5 % and 97.5 %."""

    def below(k):
        half, share = (count + 1) // 2, k / count
        return sum(math.comb(count, j) * share**j * (1 - share) ** (count - j) for j in range(half, count + 1))

    def end(probability):
        return next(k for k in range(1, count + 1) if below(k) >= probability)

    exact = {"median": (count + 1) / 2, "low": end(0.025), "high": end(0.975)}
    # Intervals of other levels have other ends.
    assert end(0.05) > exact["low"]
    assert end(0.01) < exact["low"]
    assert median_interval(range(1, count + 1), 20000) == exact


def test_the_interval_width_shrinks_with_the_root_of_the_count():
    few, many = (median_interval([k / n for k in range(n)]) for n in (101, 10001))
    assert (few["high"] - few["low"]) / (many["high"] - many["low"]) == pytest.approx(10, rel=0.2)
