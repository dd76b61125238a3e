"""Acceptance statistics, and intervals against exact distributions."""

import functools
import itertools
import math
import random

import pytest

from mmspec.engine.stats import Stats
from mmspec.eval.harness.acceptance import (
    acceptance,
    acceptance_difference,
    acceptance_line,
    copy_lengths,
    copy_oracle,
    median_interval,
)


def stats_of(*accepted, drafted=4):
    stats = Stats(num_generated_tokens=1)
    for count in accepted:
        stats.record_step(drafted, drafted, count, count + 1)
    return stats


def test_figures_match_counts_by_hand():
    requests = [stats_of(3, 0, 1), stats_of(1), stats_of()]  # the last has one token, from the prefill
    row = acceptance(requests)
    assert row["mean_acceptance_length"] == (4 + 1 + 2 + 2) / 4
    assert row["draft_acceptance_rate"] == 5 / 16
    assert (row["acceptance_by_position"], row["histogram"]) == ([0.75, 0.25, 0.25], [1, 2, 0, 1])
    assert (row["num_spec_steps"], row["num_generated_tokens"], row["requests"]) == (4, 9 + 3, 3)
    assert acceptance_line(requests) == "mmspec: 2.25 tokens per verify step over 3 requests"
    row = acceptance([stats_of()])
    assert (row["mean_acceptance_length"], row["draft_acceptance_rate"], row["acceptance_by_position"]) == (0, 0, [])


@pytest.mark.parametrize("count", [29, 43, 111])
def test_the_ends_of_a_median_are_the_exact_percentiles(count):
    """The k-th of n values is at or above the median of a resample with the probability that at least (n + 1) / 2 of n
    draws are among the k smallest: the ends of a 95 % interval are where this passes 2.5 % and 97.5 %."""

    def below(k):
        half, share = (count + 1) // 2, k / count
        return sum(math.comb(count, j) * share**j * (1 - share) ** (count - j) for j in range(half, count + 1))

    def end(probability):
        return next(k for k in range(1, count + 1) if below(k) >= probability)

    exact = {"median": (count + 1) / 2, "low": end(0.025), "high": end(0.975)}
    assert end(0.01) < exact["low"] < end(0.05)  # intervals of other levels have other ends
    assert median_interval(range(1, count + 1), 20000) == exact


def test_the_ends_of_a_difference_are_the_exact_percentiles():
    """With one step per request, of which half accept a draft, a resample's mean is 1 + Binomial(n, 1/2) / n."""
    count = 400
    below = list(itertools.accumulate(math.comb(count, k) / 2**count for k in range(count + 1)))

    def end(probability):
        return next(k for k, share in enumerate(below) if share >= probability) / count

    found = acceptance_difference([(k, stats_of(k % 2), stats_of(0)) for k in range(count)], 20000)
    assert found["difference"] == 0.5
    # Tolerance for resampling noise. A 90 % interval would be 4 requests narrower at each end.
    assert [found["low"], found["high"]] == pytest.approx([end(0.025), end(0.975)], abs=1 / count)
    assert end(0.05) - end(0.025) == pytest.approx(4 / count)


def test_requests_are_paired_and_their_groups_are_resampled_together():
    """A constant difference has no width; ten copies of each request in its group leave the interval as it is."""
    rng = random.Random(2)
    pairs = [((rng.randrange(5), rng.randrange(5)), (rng.randrange(5),)) for _ in range(12)]

    def study(times, pairs):
        groups = [(group, stats_of(*first), stats_of(*second)) for group, (first, second) in enumerate(pairs)]
        return acceptance_difference([one for one in groups for _ in range(times)])

    assert study(10, pairs) == pytest.approx(study(1, pairs))
    constant = study(1, [([count + 1 for count in steps], steps) for steps, _ in pairs])
    assert constant == pytest.approx({"difference": 1, "low": 1, "high": 1})


def test_lengths_of_copies_by_hand():
    """After each token but the last: 1 2 was followed by 3 and by 9; 4 is new; the text copies itself at the end."""
    prompt = [1, 2, 3, 1, 2, 9]
    assert copy_lengths(prompt, [1, 2, 3, 1, 4, 1, 2, 9, 9, 9]) == [3, 2, 1, 0, 0, 2, 1, 0, 1]
    assert copy_lengths(prompt, [7]) == copy_lengths(prompt, []) == []
    # Only the text so far counts: one repeated token doubles its copy with every step, up to the longest copy.
    assert copy_lengths([], [5] * 100)[:40] == [0, *range(1, 33), *[32] * 7]


@functools.cache
def fewest(text, known, most):
    """Steps, and those that draft, from a number of known tokens on: a search over all drafts of copied text."""
    if known >= len(text):
        return 0, 0
    lengths = {0}
    for place in range(known - 1):
        for length in range(1, min(most, known - 1 - place) + 1):
            if text[place] == text[known - 1] and text[place + 1 :][:length] == text[known:][:length]:
                lengths.add(length)
    steps, drafting = min(fewest(text, known + length + 1, most) for length in lengths)
    return steps + 1, drafting + (max(lengths) > 0)


def test_the_copy_oracle_needs_the_fewest_steps():
    draws, seconds = random.Random(0), lambda nodes: 1 + 0.25 * (nodes - 1)
    for _ in range(20):
        text = tuple(draws.randrange(3) for _ in range(24))
        found = copy_oracle([copy_lengths(text[:8], text[8:])], seconds)
        speedups = {}
        for most in range(1, 16):
            steps, drafting = fewest(text, 9, most)
            assert found["tokens_per_step"][str(most)] == 15 / steps
            speedups[most] = 15 / (drafting * seconds(most + 1) + (steps - drafting))
        assert found["speedup"] == pytest.approx(max(speedups.values()))
        assert speedups[found["draft_tokens"]] == pytest.approx(found["speedup"])
    assert copy_oracle([[], []], seconds) is None
    assert copy_oracle([[2, 1, 0], [0]], math.sqrt) == {
        "tokens_per_step": {str(most): 4 / (3 if most == 1 else 2) for most in range(1, 33)},
        "speedup": 4 / (math.sqrt(3) + 1),
        "draft_tokens": 2,
    }
