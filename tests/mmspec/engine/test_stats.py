import json

import pytest

from mmspec import Stats


def test_steps_add_up():
    stats = Stats(num_generated_tokens=1, time_to_first_token=0.5, wall_seconds=3.0)
    for drafted, depth, accepted, emitted in [(6, 3, 2, 3), (6, 4, 0, 1), (0, 0, 0, 1), (5, 2, 2, 3)]:
        stats.record_step(drafted, depth, accepted, emitted)
    assert stats.num_generated_tokens == 1 + 3 + 1 + 1 + 3 == 1 + sum(stats.accept_lengths)
    assert stats.accept_lengths == [3, 1, 1, 3]
    assert stats.acceptance_histogram == [2, 0, 2]
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (4, 17, 4)
    assert stats.num_spec_tokens == 4
    assert stats.mean_acceptance_length == pytest.approx(8 / 4)
    assert stats.draft_acceptance_rate == pytest.approx(4 / 17)
    assert stats.tokens_per_second == pytest.approx(8 / 2.5)


def test_nothing_done_is_nothing_and_divides_by_nothing():
    stats = Stats()
    assert {name for name, value in vars(stats).items() if value} == {"lossless"}
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate, stats.tokens_per_second) == (0.0, 0.0, 0.0)


def test_the_contracts_names_are_plain_json():
    names = [
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "num_spec_tokens",
        "num_generated_tokens",
        "prefill_seconds",
        "draft_seconds",
        "verify_seconds",
        "commit_seconds",
        "wall_seconds",
        "time_to_first_token",
        "tokens_per_second",
    ]
    figures = json.loads(json.dumps(Stats().to_dict()))
    assert set(names) <= set(figures)


def test_several_sequences_add_up():
    first = Stats(num_prompt_tokens=7, num_cached_tokens=3, num_generated_tokens=1, wall_seconds=2.0)
    first.record_step(6, 4, 2, 3)
    second = Stats(num_prompt_tokens=5, num_cached_tokens=2, num_generated_tokens=1, wall_seconds=3.0)
    for drafted, depth, accepted, emitted in [(5, 3, 0, 1), (4, 2, 1, 2)]:
        second.record_step(drafted, depth, accepted, emitted)
    whole = Stats.combined([first, second])
    assert (whole.num_prompt_tokens, whole.num_cached_tokens, whole.num_generated_tokens) == (12, 5, 8)
    assert (whole.num_spec_steps, whole.num_draft_tokens, whole.num_accepted_draft_tokens) == (3, 15, 3)
    assert whole.num_spec_tokens == 4  # of the deepest
    assert whole.acceptance_histogram == [1, 1, 1]
    assert whole.accept_lengths == [3, 1, 2]
    assert whole.wall_seconds == 0.0  # shared: no sum
    assert first.accept_lengths == [3]
