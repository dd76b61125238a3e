"""Acceptance statistics and the interval of a paired difference, against known values."""

import itertools
import math
import random

import pytest

from mmspec.engine.stats import Stats
from mmspec.eval.harness.acceptance import AcceptanceStats, acceptance_difference


def stats_of(*accepted, drafted=4):
    stats = Stats(num_generated_tokens=1)
    for count in accepted:
        stats.record_step(drafted, drafted, count, count + 1)
    return stats


def acceptance_of(*requests):
    acceptance = AcceptanceStats()
    for number, accepted in enumerate(requests):
        acceptance.add(number, stats_of(*accepted), True)
    return acceptance


def test_figures_match_counts_by_hand():
    acceptance = AcceptanceStats()
    acceptance.add("a", stats_of(3, 0, 1), True)
    acceptance.add("b", stats_of(1), False)
    acceptance.add("c", stats_of(), True)  # one token, from the prefill
    row = acceptance.to_dict()
    assert row["mean_acceptance_length"] == (4 + 1 + 2 + 2) / 4
    assert row["draft_acceptance_rate"] == 5 / 16
    assert row["acceptance_by_position"] == [0.75, 0.25, 0.25]
    assert (row["num_spec_steps"], row["num_generated_tokens"], row["requests"], row["equal"]) == (4, 9 + 3, 3, 2)
    assert row["mean_acceptance_length"] == pytest.approx(1 + sum(row["acceptance_by_position"]))


def test_no_steps():
    row = acceptance_of(()).to_dict()
    assert (row["mean_acceptance_length"], row["draft_acceptance_rate"], row["acceptance_by_position"]) == (0, 0, [])


def test_a_constant_difference_has_an_interval_of_zero_width():
    rng = random.Random(0)
    steps = [[rng.randrange(4) for _ in range(6)] for _ in range(30)]
    low = acceptance_of(*steps)
    high = acceptance_of(*[[count + 1 for count in row] for row in steps])
    found = acceptance_difference(high, low)
    assert found == {"difference": pytest.approx(1), "low": pytest.approx(1), "high": pytest.approx(1)}


def test_the_interval_has_its_nominal_coverage():
    """Two drafters whose acceptance differs by 0.29 on average, on prompts that vary: 40 per study, 200 studies."""
    rng = random.Random(1)
    covered, widths = 0, []
    for study in range(200):
        ours, theirs = [], []
        for _ in range(40):
            ease = rng.random()
            ours.append([int(rng.random() < 0.2 + 0.6 * ease) for _ in range(10)])
            theirs.append([int(rng.random() < -0.1 + 0.6 * ease) for _ in range(10)])
        found = acceptance_difference(acceptance_of(*ours), acceptance_of(*theirs), 400, study)
        # P(theirs) is cut off at 0 for the hardest sixth: the mean of max(-0.1 + 0.6 u, 0) is 0.25 / 1.2.
        truth = 0.5 - 0.25 / 1.2
        covered += found["low"] <= truth <= found["high"]
        widths.append(found["high"] - found["low"])
    assert 0.915 <= covered / 200 <= 0.98  # a 90 % interval of the same studies covers 0.895
    assert 0.05 < sum(widths) / 200 < 0.3


def test_the_interval_ends_are_the_exact_percentiles():
    """With one step per request, of which half accept a draft, a resample's mean is 1 + Binomial(n, 1/2) / n."""
    count = 400
    probabilities = [math.comb(count, k) / 2**count for k in range(count + 1)]
    below = list(itertools.accumulate(probabilities))

    def end(probability):
        return next(k for k, sum_ in enumerate(below) if sum_ >= probability) / count

    found = acceptance_difference(
        acceptance_of(*[(k % 2,) for k in range(count)]), acceptance_of(*[(0,)] * count), 20000
    )
    assert found["difference"] == 0.5
    # Tolerance for resampling noise. A 90 % interval would be 4 requests narrower at each end.
    assert [found["low"], found["high"]] == pytest.approx([end(0.025), end(0.975)], abs=1 / count)
    assert end(0.05) - end(0.025) == pytest.approx(4 / count)


def test_groups_are_resampled_together():
    """Ten copies of each request in its group leave the interval as it is."""
    rng = random.Random(2)
    pairs = [(stats_of(rng.randrange(5), rng.randrange(5)), stats_of(rng.randrange(5))) for _ in range(12)]

    def study(times):
        ours, theirs = AcceptanceStats(), AcceptanceStats()
        for group, (first, second) in enumerate(pairs):
            for _ in range(times):
                ours.add(group, first, True)
                theirs.add(group, second, True)
        return acceptance_difference(ours, theirs)

    assert study(10) == pytest.approx(study(1))


def test_different_requests_are_refused():
    with pytest.raises(ValueError, match="the same requests: got 2 and 1"):
        acceptance_difference(acceptance_of((1,), (2,)), acceptance_of((1,)))
