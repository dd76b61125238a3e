"""Acceptance statistics summed over requests, and 95 % confidence intervals by the percentile bootstrap.

Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class AcceptanceStats:
    """Acceptance of one drafter over many requests.

    Attributes:
        groups: the resampling group of each request. Requests of one group (the turns of a conversation, one prompt
            with several seeds) are not independent.
        tokens, steps: by request, tokens emitted by verify steps and the number of these steps.
        histogram: number of steps by number of accepted draft tokens.
        drafted, accepted: draft tokens over all requests.
        equal: number of requests whose output equals plain decoding's.
    """

    groups: list[Hashable] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    equal: int = 0

    def add(self, group: Hashable, stats: Stats, equal: bool) -> None:
        self.groups.append(group)
        self.tokens.append(sum(stats.accept_lengths))
        self.steps.append(stats.num_spec_steps)
        self.histogram += [0] * (len(stats.acceptance_histogram) - len(self.histogram))
        for accepted, count in enumerate(stats.acceptance_histogram):
            self.histogram[accepted] += count
        self.drafted += stats.num_draft_tokens
        self.accepted += stats.num_accepted_draft_tokens
        self.equal += equal

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verify step, bonus token included; the prefill's token belongs to no step."""
        return sum(self.tokens) / max(sum(self.steps), 1)

    @property
    def by_position(self) -> list[float]:
        """Share of steps that accepted at least 1, 2, ... draft tokens."""
        at_least = np.cumsum(self.histogram[::-1])[::-1]
        return [float(count) / sum(self.histogram) for count in at_least[1:]]

    def log_line(self) -> str:
        """Mean acceptance length as one line for a log."""
        length, requests = self.mean_acceptance_length, len(self.tokens)
        return f"mmspec: {length:.2f} tokens per verify step over {requests} requests"

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.accepted / max(self.drafted, 1),
            "acceptance_by_position": [round(share, 4) for share in self.by_position],
            "num_spec_steps": sum(self.steps),
            "num_generated_tokens": sum(self.tokens) + len(self.tokens),
            "requests": len(self.tokens),
            "equal": self.equal,
        }


def acceptance_difference(
    first: AcceptanceStats, second: AcceptanceStats, resamples: int = 4000, seed: int = 0
) -> dict[str, float]:
    """Paired difference of mean acceptance length, ``first`` minus ``second``, on the same requests.

    Returns:
        The ``difference`` and its 95 % interval, ``low`` and ``high``, by a bootstrap over groups of requests.

    Raises:
        ValueError: the statistics are of different requests.
    """
    if first.groups != second.groups:
        raise ValueError(
            f"both must have decoded the same requests: got {len(first.groups)} and {len(second.groups)} of them"
        )
    indices = {group: index for index, group in enumerate(dict.fromkeys(first.groups))}
    of_request = [indices[group] for group in first.groups]
    columns = (first.tokens, first.steps, second.tokens, second.steps)
    sums = np.stack([np.bincount(of_request, column, len(indices)) for column in columns], axis=1)  # (groups, 4)
    weights = np.full(len(indices), 1 / len(indices))
    drawn = np.random.default_rng(seed).multinomial(len(indices), weights, resamples)  # (resamples, groups)
    a_tokens, a_steps, b_tokens, b_steps = (drawn @ sums).T
    return {
        "difference": first.mean_acceptance_length - second.mean_acceptance_length,
        **percentile_interval(a_tokens / np.maximum(a_steps, 1) - b_tokens / np.maximum(b_steps, 1)),
    }
