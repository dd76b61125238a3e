"""Acceptance statistics summed over requests, what copying could reach, and 95 % intervals by the percentile bootstrap.

Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from mmspec.engine.stats import Stats


def percentile_interval(resampled: np.ndarray) -> dict[str, float]:
    """The 95 % interval of a statistic, ``low`` and ``high``, from its values on bootstrap resamples."""
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"low": float(low), "high": float(high)}


def median_interval(values: Sequence[float], resamples: int = 2000) -> dict[str, float]:
    """The ``median`` of some values with its 95 % bootstrap interval, ``low`` and ``high``."""
    array = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(len(array), size=(resamples, len(array)))
    return {"median": float(np.median(array)), **percentile_interval(np.median(array[drawn], axis=1))}


LONGEST_COPY = 32
"""Draft tokens per step of the copy oracle."""


def copy_lengths(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Number of tokens that could have been copied after each token of an answer but the last.

    Returns:
        For each, the length of the answer's longest continuation, at most ``LONGEST_COPY``, that the text known by then
        (the prompt and the answer so far) has after an earlier occurrence of this token.
    """
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
    """Upper bound for copying drafters: always draft the longest correct copy, up to a maximum number of tokens.

    Longer copies never need more steps, since the rest of a copy is also a copy for the tokens within it.

    Args:
        answers: results of ``copy_lengths`` for each answer.
        seconds: returns the seconds of a pass over a number of nodes.

    Returns:
        ``tokens_per_step`` by the largest number of draft tokens, bonus token included, without the prefill's; and the
        largest ``speedup`` over plain passes that drafts of a fixed number of tokens, ``draft_tokens``, could reach,
        when they are drafted only where the first draft token is right. None if no answer has a second token.
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
    """Acceptance over requests as plain JSON values.

    ``acceptance_by_position`` is the share of steps that accepted at least 1, 2, ... draft tokens. The prefill's
    token of each request is generated in no step.
    """
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


def acceptance_difference(
    pairs: Sequence[tuple[Hashable, Stats, Stats]], resamples: int = 4000, seed: int = 0
) -> dict[str, float]:
    """Paired difference of mean acceptance length, first minus second, on the same requests.

    Args:
        pairs: resampling group of each request, and both statistics. Requests of one group (the turns of a
            conversation, one prompt with several seeds) are not independent.

    Returns:
        The ``difference`` and its 95 % interval, ``low`` and ``high``, by a bootstrap over groups of requests.
    """
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
    drawn = np.random.default_rng(seed).multinomial(len(indices), weights, resamples)  # (resamples, groups)
    a_tokens, a_steps, b_tokens, b_steps = (drawn @ sums).T
    first, second = (Stats.combined(side).mean_acceptance_length for side in sides)
    spread = a_tokens / np.maximum(a_steps, 1) - b_tokens / np.maximum(b_steps, 1)
    return {"difference": first - second, **percentile_interval(spread)}
