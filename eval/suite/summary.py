"""Summary of a run: ratios and medians over conversations with intervals, acceptance, shares of time, scores.

Intervals are of 95 %, by the percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).

Per-request metrics follow two benchmarks: mean accepted tokens, wall-clock speedup and latency percentiles (MMSpec,
arXiv 2603.14989), output throughput and tokens per second of each user (SPEED-Bench).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.eval.harness.peers import LLAMA
from mmspec.eval.harness.timing import PHASES
from mmspec.eval.suite.methods import BASELINE, PLAIN
from mmspec.eval.suite.scoring import Sample, Scorer

Record = dict[str, Any]
ALL = "all"
OVERALL = "overall"
PERCENTILES = (50, 90, 95, 99)


def percentile_interval(resampled: np.ndarray) -> dict[str, float]:
    """The 95 % interval of a statistic, from its values on bootstrap resamples."""
    return dict(zip(("low", "high"), np.percentile(resampled, [2.5, 97.5]).tolist(), strict=True))


def median_interval(values: Sequence[float], resamples: int = 2000) -> dict[str, float]:
    """The ``median`` of some values with its 95 % bootstrap interval, ``low`` and ``high``."""
    array = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(len(array), size=(resamples, len(array)))
    return {"median": float(np.median(array)), **percentile_interval(np.median(array[drawn], axis=1))}


LONGEST_COPY = 32  # draft tokens per step of the copy oracle


def copy_lengths(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """For each token of an answer but the last, the length of the answer's longest continuation, at most
    ``LONGEST_COPY``, that the prompt or the answer so far has after an earlier occurrence of this token."""
    text, lengths = [*prompt, *answer], []
    places: dict[int, list[int]] = {}
    for at, token in enumerate(text[:-1]):
        if at >= len(prompt):
            longest = 0
            for place in places.get(token, ()):
                most, length = min(LONGEST_COPY, at - place, len(text) - 1 - at), 0
                while length < most and text[place + 1 + length] == text[at + 1 + length]:
                    length += 1
                longest = max(longest, length)
            lengths.append(longest)
        places.setdefault(token, []).append(at)
    return lengths


def copy_oracle(answers: Sequence[Sequence[int]], seconds: Callable[[int], float]) -> dict[str, Any] | None:
    """Upper bound for copying drafters, from the ``copy_lengths`` of answers: always draft the longest correct copy, up
    to a maximum number of tokens. None if no answer has a second token.

    Returns:
        ``tokens_per_step`` by the largest number of draft tokens, bonus token included, without the prefill's; and the
        largest ``speedup`` over plain passes that drafts of a fixed number of tokens, ``draft_tokens``, could reach,
        when they are drafted only where the first draft token is right.
    """
    tokens = sum(map(len, answers))
    if not tokens:
        return None
    lengths, speedups = {}, {}
    for most in range(1, LONGEST_COPY + 1):
        steps = drafting = 0
        for answer in answers:
            at = 0
            while at < len(answer):
                steps += 1
                drafting += answer[at] > 0
                at += min(answer[at], most) + 1
        lengths[str(most)] = tokens / steps
        speedups[most] = tokens * seconds(1) / (drafting * seconds(most + 1) + (steps - drafting) * seconds(1))
    best = max(speedups, key=lambda most: speedups[most])
    return {"tokens_per_step": lengths, "speedup": speedups[best], "draft_tokens": best}


def acceptance(requests: Sequence[Stats]) -> dict[str, Any]:
    """Acceptance over requests as plain JSON values. ``acceptance_by_position`` is the share of steps that accepted at
    least 1, 2, ... draft tokens. The prefill's token of each request is generated in no step."""
    total = Stats.combined(requests)
    at_least = np.cumsum(total.acceptance_histogram[::-1])[::-1]
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "acceptance_by_position": [round(float(count / at_least[0]), 4) for count in at_least[1:]],
        "histogram": total.acceptance_histogram,
        "num_spec_steps": total.num_spec_steps,
        "nodes_per_step": total.num_draft_tokens / max(total.num_spec_steps, 1),
        "num_generated_tokens": sum(total.accept_lengths) + len(requests),
        "requests": len(requests),
    }


def acceptance_line(requests: Sequence[Stats]) -> str:
    """Mean acceptance length over requests as one line for a log."""
    length = Stats.combined(requests).mean_acceptance_length
    return f"mmspec: {length:.2f} tokens per verify step over {len(requests)} requests"


def acceptance_difference(pairs: Sequence[tuple[Hashable, Stats, Stats]], resamples: int = 4000) -> dict[str, float]:
    """Paired ``difference`` of mean acceptance length, first minus second, on the same requests, and its 95 % interval,
    ``low`` and ``high``, by a bootstrap over groups of requests. ``pairs``: group of each request, and both statistics;
    requests of one group (turns of a conversation, seeds of a prompt) are not independent."""
    groups, *sides = zip(*pairs, strict=True)
    indices = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    of_request = [indices[group] for group in groups]
    columns = [
        column
        for side in sides
        for column in ([sum(one.accept_lengths) for one in side], [one.num_spec_steps for one in side])
    ]
    sums = np.stack([np.bincount(of_request, column, len(indices)) for column in columns], axis=1)  # (groups, 4)
    weights = np.full(len(indices), 1 / len(indices))
    drawn = np.random.default_rng(0).multinomial(len(indices), weights, resamples)  # (resamples, groups)
    a_tokens, a_steps, b_tokens, b_steps = (drawn @ sums).T
    first, second = (Stats.combined(side).mean_acceptance_length for side in sides)
    spread = a_tokens / np.maximum(a_steps, 1) - b_tokens / np.maximum(b_steps, 1)
    return {"difference": first - second, **percentile_interval(spread)}


def summarise(
    records: Sequence[Record], samples: Mapping[str, Sequence[Sample]], scorers: Mapping[str, Scorer | None]
) -> list[dict[str, Any]]:
    """A row of results per task (and over all tasks, if several), temperature, batch size and method.

    Returns:
        Rows of plain JSON values. Ratios are speedups in seconds per token over the ``baseline`` (transformers'
        ``generate`` where it was measured, else our plain decoding), over our plain decoding and over llama.cpp's, by
        batch of conversations: their ``median`` with its 95 % bootstrap interval, ``low`` and ``high``.
        ``acceptance_difference`` is the difference in tokens per verify step to the first drafting method
        (``against``), on the conversations that both answered. ``draft_cost`` and ``verify_cost`` of a tree are in
        one-node passes. ``requests`` has per-request metrics, see ``by_request``. ``copy_oracle`` is computed from
        plain decoding's answers in batches of one conversation.
    """
    cells: dict[tuple[str, float, int], list[Record]] = {}
    tasks = dict.fromkeys(record["task"] for record in records)
    for record in records:
        for name in (record["task"], *([ALL] if len(tasks) > 1 else [])):
            cells.setdefault((name, record["temperature"], record["batch"]), []).append(record)
    rows = []
    for (task, temperature, batch), group in sorted(cells.items(), key=lambda cell: cell[0][0] != ALL):
        methods = dict.fromkeys(m for record in group for m in record["turns"][0]["methods"])
        drafting = [
            name for name in methods if any(one.num_draft_tokens for one in _stats(_measured(group, name), name))
        ]
        for method in methods:
            measured = _measured(group, method)
            row = {"task": task, "temperature": temperature, "batch": batch, "method": method}
            row |= figures(measured, method)
            compared = method in drafting[1:]
            row["acceptance_difference"] = _difference(measured, method, drafting[0]) if compared else None
            row["requests"] = by_request(measured, method)
            row["copy_oracle"] = _copy_oracle(measured) if method == PLAIN else None
            if task != ALL:
                row |= _scores(measured, method, samples[task], scorers[task])
            rows.append(row)
    return rows


def _spent(record: Record, method: str) -> dict[str, float]:
    """Times of a batch of conversations, summed over its turns (medians over the rounds): those of ``TimedBatch``, and
    ``first``, the mean time to the first token; ``tokens``, ``later_tokens`` (after the first of each answer), and
    ``prompt_tokens``, as our plain decoding counts them."""
    results = [turn["methods"][method] for turn in record["turns"]]
    names = results[0]["seconds"][0]
    spent = {name: sum(median(s[name] for s in result["seconds"]) for result in results) for name in names}
    first = [median(s["total"] - s["decoding"] for s in result["seconds"]) for result in results]
    spent["first"] = sum(first) / len(first)
    spent["tokens"] = sum(len(answer) for result in results for answer in result["answers"])
    spent["later_tokens"] = spent["tokens"] - sum(len(result["answers"]) for result in results)
    plain = [turn["methods"].get(PLAIN, {"stats": []}) for turn in record["turns"]]
    spent["prompt_tokens"] = sum(stats.get("num_prompt_tokens", 0) for result in plain for stats in result["stats"])
    return spent


def _ratio(records: Sequence[Record], method: str, other: str, seconds: str, tokens: str) -> dict[str, float] | None:
    """Speedup over ``other`` in seconds per token, where it was measured."""
    ratios = []
    for record in _measured(records, other):
        own, base = _spent(record, method), _spent(record, other)
        if min(own[tokens], base[tokens]) > 0:
            ratios.append(base[seconds] / base[tokens] / (own[seconds] / own[tokens]))
    return median_interval(ratios) if ratios else None


def _measured(records: Sequence[Record], method: str) -> list[Record]:
    return [record for record in records if method in record["turns"][0]["methods"]]


def _stats(records: Sequence[Record], method: str) -> list[Stats]:
    return [Stats(**row) for record in records for turn in record["turns"] for row in turn["methods"][method]["stats"]]


def _difference(records: Sequence[Record], method: str, other: str) -> dict[str, Any] | None:
    """Paired difference in tokens per verify step to ``other``, where both were measured."""
    pairs = [
        (group, *rows)
        for group, record in enumerate(_measured(records, other))
        for rows in zip(_stats([record], method), _stats([record], other), strict=True)
    ]
    return {"against": other, **acceptance_difference(pairs)} if pairs else None


def _copy_oracle(records: Sequence[Record]) -> dict[str, Any] | None:
    found = [turn["copy_lengths"] for record in records for turn in record["turns"] if "copy_lengths" in turn]
    if not found:
        return None
    cost = records[0]["about"]["cost"]
    return copy_oracle(found, lambda nodes: float(np.interp(nodes, cost["tokens"], cost["seconds"])))


def figures(records: Sequence[Record], method: str) -> dict[str, Any]:
    """Results of a method over conversations, see ``summarise``."""
    base = BASELINE if _measured(records, BASELINE) else PLAIN
    spent = [_spent(record, method) for record in records]
    results = [result["methods"][method] for record in records for result in record["turns"]]
    stats = _stats(records, method)
    passes = [_spent(record, PLAIN).get("pass") for record in records]
    costs = {  # an adaptive method may not have drafted in some conversations
        part: [own[part] / one for own, one in zip(spent, passes, strict=True) if one and own.get(part)]
        for part in ("tree", "pass")
    }
    shares = {part: sum(s[part] for s in spent) / sum(s["total"] for s in spent) for part in PHASES if part in spent[0]}
    if shares:
        shares["rest"] = 1 - sum(shares.values())
    compared = [equal for result in results for equal in result["equal"] if equal is not None]
    return {
        "conversations": sum(len(record["ids"]) for record in records),
        "tokens": int(sum(s["tokens"] for s in spent)),
        "baseline": base,
        "end_to_end": _ratio(records, method, base, "total", "tokens"),
        "end_to_end_plain": _ratio(records, method, PLAIN, "total", "tokens"),
        "end_to_end_llama": _ratio(records, method, LLAMA, "total", "tokens"),
        "decoding": _ratio(records, method, base, "decoding", "later_tokens"),
        "decoding_plain": _ratio(records, method, PLAIN, "decoding", "later_tokens"),
        "draft_cost": median(costs["tree"]) if costs["tree"] else None,
        "verify_cost": median(costs["pass"]) if costs["pass"] else None,
        "tokens_per_second": median(s["tokens"] / s["total"] for s in spent),
        "time_to_first_token": median(s["first"] for s in spent),
        "shares": shares,
        "memory": max((result["memory"] for result in results if result["memory"] is not None), default=None),
        "acceptance": acceptance(stats) if any(one.num_spec_steps for one in stats) else None,
        "lossless": all(stats.get("lossless", True) for result in results for stats in result["stats"]),
        "equal": sum(compared),
        "compared": len(compared),
        "differences": [
            {"task": record["task"], "id": record["ids"][turn["rows"][difference["row"]]], "turn": place, **difference}
            for record in records
            for place, turn in enumerate(record["turns"])
            for difference in turn["methods"][method]["differences"]
        ],
    }


def _requests(records: Sequence[Record], method: str) -> dict[tuple[str, int, int, int], Record]:
    """Each request, a turn of a conversation, by task, batch, turn and row, with medians over the rounds."""
    found = {}
    for record in _measured(records, method):
        for place, turn in enumerate(record["turns"]):
            result = turn["methods"][method]
            # Records of earlier versions have no times of rows.
            rounds = result.get("request_seconds") or [[s] * len(turn["rows"]) for s in result["seconds"]]
            for index, (row, answer, equal) in enumerate(
                zip(turn["rows"], result["answers"], result["equal"], strict=True)
            ):
                found[record["task"], record["group"], place, row] = {
                    "category": record["categories"][row],
                    "tokens": len(answer),
                    "steps": result["stats"][index]["accept_lengths"] if result["stats"] else [],
                    "equal": equal,
                    **{name: median(rows[index][name] for rows in rounds) for name in ("total", "decoding")},
                }
    return found


def by_request(records: Sequence[Record], method: str) -> dict[str, dict[str, Any]]:
    """Per-request metrics, ``overall`` and by category.

    Returns:
        ``mean_accepted_tokens`` per verify step, bonus token included; ``walltime_speedup``, the mean over the requests
        of speedups in tokens per second over our plain decoding, and ``slowest``, the minimum, for the ``total`` time
        and for ``decoding`` (tokens after the first); ``latency`` in seconds, and ``user_tokens_per_second``
        after the first token, as mean and percentiles; ``output_tokens_per_second`` of batches one after another,
        and its ratio to plain decoding, ``throughput_speedup``. Throughput leaves batches of several categories out.
    """
    every, plain = _requests(records, method), _requests(records, PLAIN)
    found = {}
    for category in dict.fromkeys([OVERALL, *(name for record in records for name in record["categories"] if name)]):
        own = {key: one for key, one in every.items() if category in (OVERALL, one["category"])}
        both = [(one, plain[key]) for key, one in own.items() if key in plain]
        ratios, decoding = (
            [
                (one["tokens"] - before) / one[part] * base[part] / (base["tokens"] - before)
                for one, base in both
                if min(one["tokens"], base["tokens"]) > before and one[part] > 0
            ]
            for part, before in (("total", 0), ("decoding", 1))
        )
        steps = [tokens for one in own.values() for tokens in one["steps"]]
        whole = [record for record in records if category == OVERALL or set(record["categories"]) == {category}]
        speed, base = throughput(whole, method), throughput(whole, PLAIN)
        later = [one for one in own.values() if one["tokens"] > 1 and one["decoding"] > 0]
        compared = [one["equal"] for one in own.values() if one["equal"] is not None]
        found[category] = {
            "requests": len(own),
            "tokens": sum(one["tokens"] for one in own.values()),
            "mean_accepted_tokens": fmean(steps) if steps else None,
            "walltime_speedup": fmean(ratios) if ratios else None,
            "slowest": {"total": min(ratios, default=None), "decoding": min(decoding, default=None)},
            "throughput_speedup": speed / base if speed and base else None,
            "latency": _percentiles([one["total"] for one in own.values()]),
            "output_tokens_per_second": speed,
            "user_tokens_per_second": _percentiles([(one["tokens"] - 1) / one["decoding"] for one in later]),
            "equal": sum(compared),
            "compared": len(compared),
        }
    return found


def throughput(records: Sequence[Record], method: str, seconds: str = "total", tokens: str = "tokens") -> float | None:
    """Tokens per second of batches one after another, with the names of ``_spent``; None without any."""
    spent = [_spent(record, method) for record in _measured(records, method)]
    return sum(s[tokens] for s in spent) / sum(s[seconds] for s in spent) if any(s[tokens] for s in spent) else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles, interpolated linearly."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES).tolist()
    return {"mean": fmean(values), **{f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}}


def _scores(records: Sequence[Record], method: str, samples: Sequence[Sample], scorer: Scorer | None) -> dict[str, Any]:
    if scorer is None:
        return {"score": {}}
    by_id = {sample.id: sample for sample in samples}
    answered = [
        (
            by_id[sample],
            [t["methods"][method]["texts"][t["rows"].index(row)] for t in record["turns"] if row in t["rows"]],
        )
        for record in records
        for row, sample in enumerate(record["ids"])
    ]
    try:
        return {"score": scorer(answered)}
    except UserError as error:  # a missing library must not lose the measurements
        return {"score": {}, "not_scored": str(error)}
