"""Intervals against exact distributions and the definition."""

import math

import pytest

from mmspec.eval.harness.intervals import median_interval, wilson_interval


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


@pytest.mark.parametrize(("count", "total"), [(0, 60), (60, 60), (1, 3), (35, 60), (7, 20)])
def test_the_ends_of_wilsons_interval_are_where_the_score_test_rejects(count, total):
    """|share - p| / sqrt(p (1 - p) / n) is the normal quantile, at which a two-sided test has a level of 5 %."""
    found = wilson_interval(count, total)
    assert found["share"] == count / total
    ends = [found[end] for end, closed in (("low", count == 0), ("high", count == total)) if not closed]
    for end in ends:
        deviation = abs(found["share"] - end) / math.sqrt(end * (1 - end) / total)
        assert math.erf(deviation / math.sqrt(2)) == pytest.approx(0.95, abs=1e-12)
    assert found["low"] <= found["share"] <= found["high"]
    assert (found["low"] == 0.0, found["high"] == 1.0) == (count == 0, count == total)


@pytest.mark.parametrize(("count", "total"), [(1, 0), (0, 0), (4, 3), (-1, 3)])
def test_wilsons_interval_needs_trials(count, total):
    with pytest.raises(ValueError, match="expected 0 <= count <= total"):
        wilson_interval(count, total)
