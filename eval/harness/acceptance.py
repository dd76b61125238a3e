"""What drafters got accepted, summed up over requests; and how two of them compare on the same requests."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eval.harness.drafters import Watched
from mmspec.stats import Stats


@dataclass
class Tally:
    """One drafter's steps, by request.

    Attributes:
        groups: what each request belongs to: requests of one group (the turns of a conversation, one prompt with
            several seeds) do not vary independently.
        tokens, steps: tokens emitted by verify steps, and these steps.
        histogram: steps by number of accepted drafts.
        drafted, accepted: drafts in all.
        trees, forwards: trees drafted and the drafter's passes for them; None where it does not tell.
        equal: requests whose tokens were those of plain decoding.
    """

    groups: list[Hashable] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    trees: int = 0
    forwards: int | None = 0
    equal: int = 0

    def add(self, group: Hashable, stats: Stats, equal: bool) -> None:
        """Count a request."""
        self.groups.append(group)
        self.tokens.append(sum(stats.accept_lengths))
        self.steps.append(stats.num_spec_steps)
        self._add_histogram(stats.acceptance_histogram)
        self.drafted += stats.num_draft_tokens
        self.accepted += stats.num_accepted_draft_tokens
        self.equal += equal

    def watch(self, drafter: Watched) -> None:
        """Count what a drafter did, once after its requests."""
        self.trees += drafter.proposals
        told = self.forwards is not None and drafter.forwards is not None
        self.forwards = (self.forwards or 0) + (drafter.forwards or 0) if told else None

    def __add__(self, other: Tally) -> Tally:
        forwards = None if self.forwards is None or other.forwards is None else self.forwards + other.forwards
        both = Tally(
            self.groups + other.groups,
            self.tokens + other.tokens,
            self.steps + other.steps,
            list(self.histogram),
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.trees + other.trees,
            forwards,
            self.equal + other.equal,
        )
        both._add_histogram(other.histogram)
        return both

    def _add_histogram(self, histogram: list[int]) -> None:
        self.histogram += [0] * (len(histogram) - len(self.histogram))
        for accepted, count in enumerate(histogram):
            self.histogram[accepted] += count

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verify step, the bonus token counted; the prefill's token is not one of a step."""
        return sum(self.tokens) / max(sum(self.steps), 1)

    @property
    def by_position(self) -> list[float]:
        """Share of the steps that accepted at least 1, 2, ... drafts."""
        beyond = np.cumsum(self.histogram[::-1])[::-1]
        return [float(count) / sum(self.histogram) for count in beyond[1:]]

    def told(self) -> str:
        """One line for a log."""
        length, requests = self.mean_acceptance_length, len(self.tokens)
        return f"mmspec: {length:.2f} tokens per verify step over {requests} requests"

    def row(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.accepted / max(self.drafted, 1),
            "acceptance_by_position": [round(share, 4) for share in self.by_position],
            "forwards_per_tree": None if self.forwards is None else self.forwards / max(self.trees, 1),
            "num_spec_steps": sum(self.steps),
            "num_generated_tokens": sum(self.tokens) + len(self.tokens),
            "requests": len(self.tokens),
            "equal": self.equal,
        }


def difference(first: Tally, second: Tally, resamples: int = 4000, seed: int = 0) -> dict[str, float]:
    """How much longer ``first`` accepts than ``second`` on the same requests.

    Groups of requests are drawn with replacement, the same ones for both (the percentile bootstrap; Efron and
    Tibshirani, An Introduction to the Bootstrap, chapter 13).

    Returns:
        ``difference`` of the mean acceptance lengths, and the ends of its 95 % interval, ``low`` and ``high``.

    Raises:
        ValueError: the tallies are of different requests.
    """
    if first.groups != second.groups:
        raise ValueError(
            f"both must have decoded the same requests: got {len(first.groups)} and {len(second.groups)} of them"
        )
    names = {group: place for place, group in enumerate(dict.fromkeys(first.groups))}
    place = [names[group] for group in first.groups]
    columns = (first.tokens, first.steps, second.tokens, second.steps)
    sums = np.stack([np.bincount(place, column, len(names)) for column in columns], axis=1)  # (groups, 4)
    drawn = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), resamples)
    a_tokens, a_steps, b_tokens, b_steps = (drawn @ sums).T
    spread = a_tokens / np.maximum(a_steps, 1) - b_tokens / np.maximum(b_steps, 1)
    low, high = np.percentile(spread, [2.5, 97.5])
    return {
        "difference": first.mean_acceptance_length - second.mean_acceptance_length,
        "low": float(low),
        "high": float(high),
    }
