"""Summaries of records with known times and token counts, against closed forms."""

import functools
import itertools
import math
import random
import statistics

import pytest

from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.eval.harness.prompts import Questions
from mmspec.eval.harness.timing import PHASES, TimedBatch
from mmspec.eval.suite.scoring import Sample
from mmspec.eval.suite.summary import (
    acceptance,
    acceptance_difference,
    acceptance_line,
    copy_lengths,
    copy_oracle,
    median_interval,
    summarise,
)

TASK = "scenes-captions"


def method(total, tokens=(11,), decoding=None, stats=(), equal=None, memory=5, **parts):
    """A method's results of a turn, in three rounds with a median time of ``total`` seconds."""
    spent = {"total": total, "decoding": total / 2 if decoding is None else decoding, **parts}
    rounds = [{name: factor * value for name, value in spent.items()} for factor in (1, 9, 0.5)]
    answers = [[1] * count for count in tokens]
    texts = [f"{count} tokens" for count in tokens]
    found = {"answers": answers, "texts": texts, "seconds": rounds, "stats": list(stats), "memory": memory}
    return {**found, "equal": list(equal or [True] * len(tokens)), "differences": []}


def record(group, *turns, task=TASK, ids=None, rows=None):
    """A record of a batch of conversations; each turn gives results by method, in addition to both baselines'."""
    rows = rows or list(range(len(ids or "x")))
    baselines = {name: method(1.0, (11,) * len(rows)) for name in ("generate", "none")}
    results = [{"rows": rows, "methods": baselines | turn} for turn in turns]
    head = {"task": task, "temperature": 0.0, "batch": len(ids or "x"), "group": group, "ids": ids or [str(group)]}
    return {**head, "categories": [""] * len(head["ids"]), "turns": results, "refused": {}}


def rows_of(*records, samples=(), scorer=None, tasks=(TASK,)):
    rows = summarise(records, dict.fromkeys(tasks, samples), dict.fromkeys(tasks, scorer))
    return {row["method"] if len(tasks) == 1 else (row["task"], row["method"]): row for row in rows}


def stats_of(*accepted, drafted=4):
    """Statistics of verify steps, given the accepted draft tokens of each."""
    stats = Stats(num_generated_tokens=1)
    for count in accepted:
        stats.record_step(drafted, drafted, count, count + 1)
    return stats


def steps(*accepted, drafted=4):
    return dict(vars(stats_of(*accepted, drafted=drafted)))


RATIOS = "end_to_end", "end_to_end_plain", "end_to_end_llama", "decoding", "decoding_plain"


def medians(row):
    return {name: row[name] and row[name]["median"] for name in RATIOS}


def test_ratios_are_paired_by_conversation():
    # Ratios by conversation are 2, 2 and 4; a ratio of sums would be dominated by the slow conversation.
    seconds = [(2.0, 1.0), (200.0, 100.0), (4.0, 1.0)]
    made = [record(k, {"generate": method(slow), "none": method(fast)}) for k, (slow, fast) in enumerate(seconds)]
    none = rows_of(*made)["none"]
    assert none["end_to_end"] == {"median": 2.0, "low": 2.0, "high": 4.0}
    assert none["decoding"]["median"] == 2.0
    assert none["end_to_end_llama"] is None  # it was not measured
    assert (none["tokens_per_second"], none["time_to_first_token"]) == (11.0, 0.5)


def test_ratios_are_of_seconds_per_token():
    """Two turns; the methods emit 12, 20 and 6 tokens, 2 of them from prefills, in 6, 4 and 4 seconds."""
    turns = [
        {"generate": method(4.0, (5,), 1.5), "none": method(3.0, (15,), 1.0), "llama.cpp": method(3.0, (4,), 2.0)},
        {"generate": method(2.0, (7,), 1.0), "none": method(1.0, (5,), 0.8), "llama.cpp": method(1.0, (2,), 0.5)},
    ]
    rows = rows_of(record(0, *turns))
    whole = {"generate": 6 / 12, "none": 4 / 20, "llama.cpp": 4 / 6}
    decoding = {"generate": 2.5 / (12 - 2), "none": 1.8 / (20 - 2), "llama.cpp": 2.5 / (6 - 2)}
    for name, row in rows.items():
        expected = [whole[base] / whole[name] for base in whole]
        expected += [decoding[base] / decoding[name] for base in ("generate", "none")]
        assert medians(row) == pytest.approx(dict(zip(RATIOS, expected, strict=True)))
    assert [row["tokens"] for row in rows.values()] == [12, 20, 6]
    assert [row["tokens_per_second"] for row in rows.values()] == pytest.approx([12 / 6, 20 / 4, 6 / 4])
    # The mean time to first token over the turns.
    first = [rows[name]["time_to_first_token"] for name in ("llama.cpp", "none")]
    assert first == pytest.approx([(1.0 + 0.5) / 2, (2.0 + 0.2) / 2])


def test_without_generate_ratios_are_to_plain_decoding():
    made = [record(k, {"msd": method(total, (6,), total / 4)}) for k, total in enumerate((0.5, 1.0, 0.25))]
    for one in made:
        del one["turns"][0]["methods"]["generate"]
    rows = rows_of(*made)
    assert {row["baseline"] for row in rows.values()} == {"none"}
    found = rows["msd"]
    whole, decoding = (1 / 11) / (0.5 / 6), (0.5 / 10) / (0.125 / 5)
    expected = {"end_to_end_llama": None, **dict.fromkeys(RATIOS[:2], whole), **dict.fromkeys(RATIOS[3:], decoding)}
    assert medians(found) == pytest.approx(expected)
    slowest = {"total": (1 / 11) / (1 / 6), "decoding": (0.5 / 10) / (0.25 / 5)}
    assert found["requests"]["overall"]["slowest"] == pytest.approx(slowest)
    assert rows_of(record(0, {}))["none"]["baseline"] == "generate"


def test_the_copy_oracle_is_of_plain_decodings_answers():
    made = [record(0, {}), record(1, {}, {})]
    for turn, lengths in zip((made[0]["turns"][0], *made[1]["turns"]), ([3, 2, 1, 0], [], [0]), strict=True):
        turn["copy_lengths"] = lengths
    made[0]["about"] = {"cost": {"tokens": [1, 33], "seconds": [1.0, 9.0]}}
    rows = rows_of(*made)
    assert rows["generate"]["copy_oracle"] is None
    found = rows["none"]["copy_oracle"]
    assert (found["speedup"], found["draft_tokens"]) == (5 / (1.75 + 1), 3)
    assert [found["tokens_per_step"][most] for most in ("1", "2", "3", "8")] == [5 / 3, 5 / 3, 5 / 2, 5 / 2]
    assert rows_of(record(0, {}))["none"]["copy_oracle"] is None


def test_answers_of_one_token_have_no_decoding_ratio():
    rows = rows_of(record(0, {"generate": method(2.0, (1,)), "none": method(1.0, (1,))}))
    assert rows["none"]["decoding"] is rows["none"]["decoding_plain"] is None
    assert rows["none"]["end_to_end"]["median"] == 2.0
    rows = rows_of(record(0, {"generate": method(2.0, (1,)), "none": method(1.0, (2,))}))
    assert rows["none"]["decoding"] is None
    assert rows["none"]["decoding_plain"]["median"] == 1.0
    rows = rows_of(record(0, {"generate": method(8.0, (9, 3)), "none": method(2.0, (5, 3))}, ids=["a", "b"]))
    assert rows["none"]["decoding"]["median"] == pytest.approx(4.0 / (12 - 2) / (1.0 / (8 - 2)))


def test_shares_of_time():
    parts = [(10.0, (1.0, 1.0, 2.0, 4.0, 1.0)), (15.0, (0.0, 2.0, 0.0, 8.0, 0.0))]
    made = [
        record(k, {"generate": method(30.0), "none": method(total, **dict(zip(PHASES, part, strict=True)))})
        for k, (total, part) in enumerate(parts)
    ]
    rows = rows_of(*made)
    assert rows["generate"]["shares"] == {}
    shares = {"tower": 1 / 25, "prefill": 3 / 25, "draft": 2 / 25, "verify": 12 / 25, "commit": 1 / 25, "rest": 6 / 25}
    assert rows["none"]["shares"] == pytest.approx(shares)


def test_acceptance_memory_and_equality():
    turn = {
        "none": method(1.0, (8, 4)),
        "msd": method(1.0, (8, 4), stats=(steps(3, 0, 1), steps(2)), equal=(True, False)),
    }
    other = {"none": method(1.0, equal=(None,), memory=None), "msd": method(1.0, stats=(steps(1, 1),), memory=7)}
    rows = rows_of(record(0, turn, ids=["a", "b"], rows=[0, 1]), record(1, other, ids=["c", "d"], rows=[0]))
    found = rows["msd"]
    assert found["acceptance"]["mean_acceptance_length"] == (4 + 1 + 2 + 3 + 2 + 2) / 6
    assert (found["equal"], found["compared"], found["memory"], found["conversations"]) == (2, 3, 7, 4)
    assert (rows["none"]["equal"], rows["none"]["compared"], rows["none"]["memory"]) == (2, 2, 5)
    assert rows["none"]["acceptance"] is None
    without = {**steps(0), "num_spec_steps": 0, "accept_lengths": []}
    assert rows_of(record(0, {"none": method(1.0, (1,), stats=(without,))}))["none"]["acceptance"] is None


def test_differences_name_their_conversation_and_turn():
    made = record(0, *({"none": method(1.0, (11, 11))} for _ in range(2)), ids=["a", "b", "c"], rows=[2, 0])
    made["turns"][1]["methods"]["none"]["differences"] = [{"row": 0, "position": 4}, {"row": 1, "position": 0}]
    assert rows_of(made)["none"]["differences"] == [
        {"task": TASK, "id": "c", "turn": 1, "row": 0, "position": 4},
        {"task": TASK, "id": "a", "turn": 1, "row": 1, "position": 0},
    ]


def test_tasks_are_summarised_separately_and_together():
    first = record(0, {"none": method(1.0, (4,)), "msd": method(2.0, (4,))})
    second = record(0, {"none": method(3.0, (8,))}, task="other")
    rows = rows_of(first, second, tasks=(TASK, "other"))
    methods = {"all": ("generate", "none", "msd"), TASK: ("generate", "none", "msd"), "other": ("generate", "none")}
    assert list(rows) == [(task, name) for task, names in methods.items() for name in names]
    assert rows["all", "none"]["tokens"] == 12
    # A method is summarised over the records that contain it.
    assert rows["all", "msd"]["tokens"] == 4
    assert "score" not in rows["all", "none"]
    assert rows["other", "none"]["score"] == {}
    warm = summarise([first, {**first, "temperature": 1.0}], {TASK: ()}, {TASK: None})
    assert [(row["task"], row["temperature"]) for row in warm] == [(TASK, 0.0)] * 3 + [(TASK, 1.0)] * 3


def test_scorers_get_the_answers_of_each_conversation():
    """Conversation b has one turn: the rows of the second turn are a and c."""
    turns = [{name: method(1.0, tokens) for name in ("generate", "none")} for tokens in ((1, 2, 3), (4, 5))]
    made = record(0, *turns, ids=["a", "b", "c"])
    made["turns"][1]["rows"] = [0, 2]
    samples = [Sample(name, Questions(("?",))) for name in "cba"]
    seen = []
    rows = rows_of(made, samples=samples, scorer=lambda answered: seen.append(answered) or {"right": 0.5})
    assert rows["none"]["score"] == {"right": 0.5}
    assert seen[0] == seen[1]
    assert [(sample.id, answers) for sample, answers in seen[1]] == [
        ("a", ["1 tokens", "4 tokens"]),
        ("b", ["2 tokens"]),
        ("c", ["3 tokens", "5 tokens"]),
    ]

    def missing(answered):
        raise UserError("no such package")

    rows = rows_of(made, samples=samples, scorer=missing)
    assert (rows["none"]["score"], rows["none"]["not_scored"]) == ({}, "no such package")


def test_the_cost_of_a_draft_is_in_one_node_passes():
    def timed(tree, one):
        found = method(1.0)
        found["seconds"] = [{**found["seconds"][0], "tree": tree, "pass": one}]
        return found

    made = [record(k, {"none": timed(0.0, 0.5), "msd": timed(tree, 9.0)}) for k, tree in enumerate((0.1, 0.2, 0.4))]
    rows = rows_of(*made)
    assert rows["msd"]["draft_cost"] == pytest.approx(0.2 / 0.5)
    assert rows["msd"]["verify_cost"] == pytest.approx(9.0 / 0.5)
    assert rows["none"]["draft_cost"] is rows["generate"]["draft_cost"] is None


def test_acceptance_is_compared_with_the_first_method_that_drafts():
    """Paired by conversation: the second one's was not decoded by the last method, which is left out there."""
    plain = method(1.0, stats=(steps(0, drafted=0),))
    both = {"none": plain, "msd": method(1.0, stats=(steps(1, 1),)), "flash": method(1.0, stats=(steps(3),))}
    more = {"none": plain, "msd": method(1.0, stats=(steps(1),))}
    rows = rows_of(record(0, both), record(1, both), record(2, more))
    assert rows["generate"]["acceptance_difference"] is rows["none"]["acceptance_difference"] is None
    assert rows["msd"]["acceptance_difference"] is None
    expected = {"against": "msd", "difference": 4.0 - 2.0, "low": 2.0, "high": 2.0}
    assert rows["flash"]["acceptance_difference"] == expected
    apart = rows_of(record(0, {"msd": both["msd"]}), record(1, {"flash": both["flash"]}))
    assert apart["flash"]["acceptance_difference"] is None


def test_figures_by_request_in_batches_of_several_categories():
    """Three conversations, two in one batch; the second ends early, and times are medians of three rounds."""
    together = {
        "none": method(4.0, (8, 2), stats=(steps(*[0] * 7), steps(0))),
        "msd": method(2.0, (8, 2), stats=(steps(3, 2), steps(0)), equal=(True, False)),
        "generate": method(8.0, (8, 2)),
    }
    for name, whole in (("none", 4.0), ("msd", 2.0)):
        rows = [{"total": whole, "decoding": whole - 1}, {"total": whole / 4, "decoding": 0.25}]
        slow = [{key: 10 * value for key, value in row.items()} for row in rows]
        together[name]["request_seconds"] = [rows, slow, rows]
    alone = {"none": method(3.0, (6,), stats=(steps(*[0] * 5),)), "msd": method(1.0, (6,), stats=(steps(4),))}
    made = [record(0, together, ids=["a", "b"]), record(1, alone)]
    made[0]["categories"], made[1]["categories"] = ["long", "short"], ["short"]
    made[1]["batch"] = 2  # the last batch, which is not full
    rows = rows_of(*made)
    found = rows["msd"]["requests"]
    assert list(found) == ["overall", "long", "short"]
    assert [one["requests"] for one in found.values()] == [3, 1, 2]
    assert [one["tokens"] for one in found.values()] == [16, 8, 8]
    assert [one["mean_accepted_tokens"] for one in found.values()] == [(4 + 3 + 1 + 5) / 4, 3.5, 3.0]
    assert [one["walltime_speedup"] for one in found.values()] == pytest.approx([(2 + 2 + 3) / 3, 2.0, 2.5])
    assert [one["slowest"]["total"] for one in found.values()] == pytest.approx([2.0, 2.0, 2.0])
    assert [one["slowest"]["decoding"] for one in found.values()] == pytest.approx([1.0, 3.0, 1.0])
    # The first batch is of two categories.
    assert [one["output_tokens_per_second"] for one in found.values()] == [pytest.approx(16 / 3), None, 6.0]
    assert [one["throughput_speedup"] for one in found.values()] == [pytest.approx(16 / 3 / (16 / 7)), None, 3.0]
    user = [7 / 1.0, 1 / 0.25, 5 / 0.5]
    assert found["overall"]["user_tokens_per_second"]["mean"] == pytest.approx(sum(user) / 3)
    cuts = statistics.quantiles([2.0, 0.5, 1.0], n=100, method="inclusive")
    expected = {"mean": 3.5 / 3, **{f"p{p}": cuts[p - 1] for p in (50, 90, 95, 99)}}
    assert found["overall"]["latency"] == pytest.approx(expected)
    assert [(one["equal"], one["compared"]) for one in found.values()] == [(2, 3), (1, 1), (1, 2)]
    generate = rows["generate"]["requests"]["overall"]
    assert generate["mean_accepted_tokens"] is None
    assert generate["latency"]["p50"] == 8.0  # both rows of its batch


def test_rows_of_a_batch_have_times_of_their_own():
    own = [Stats(wall_seconds=3.0, time_to_first_token=1.0), Stats(wall_seconds=1.5, time_to_first_token=1.0)]
    timed = TimedBatch([[1] * 5, [1] * 2], own, {"total": 3.5, "decoding": 2.0})
    assert timed.request_seconds == [{"total": 3.5, "decoding": 2.0}, {"total": 2.0, "decoding": 0.5}]
    theirs = TimedBatch([[1] * 5, [1] * 2], [], {"total": 3.5, "decoding": 2.0})
    assert theirs.request_seconds == [{"total": 3.5, "decoding": 2.0}] * 2


# ------------------------------------------------------------------ acceptance, intervals and copies


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
