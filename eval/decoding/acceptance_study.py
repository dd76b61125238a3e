"""Acceptance of drafters on held-out conversations, with tables and paired comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from mmspec.compare import first_difference
from mmspec.core.drafter import Drafter, fork
from mmspec.eval.harness.acceptance import AcceptanceStats, acceptance_difference
from mmspec.eval.harness.drafters import ProfiledDrafter, tree_sizes
from mmspec.eval.harness.output import Column, make_table, percent
from mmspec.eval.harness.prompts import Conversation
from mmspec.eval.harness.timing import UNFILTERED
from mmspec.pipeline import Pipeline

POSITIONS = 5
"""Columns of acceptance by position in the table; the JSON result has all positions."""

MAX_UNEQUAL = 20
"""Unequal outputs that a study records in detail."""


@dataclass(frozen=True)
class Condition:
    """What one row of a study is measured for. ``size`` is as given on the command line, ``nodes`` its value."""

    suite: str
    temperature: float
    drafter: str
    size: str
    nodes: int


@dataclass
class AcceptanceStudy:
    """Measures drafters on conversations with one target, and compares every output with plain decoding's.

    Args:
        pipe: the target, without a drafter.
        drafters: by label.
        nodes: tree sizes, as for ``tree_sizes``.
        temperatures: above 0, outputs are sampled.
        seeds: number of seeds per request when sampling.
        max_new_tokens: of each answer.
        advance: progress callback, called after every decoded answer.

    Attributes:
        results: acceptance by condition.
        unequal: the first outputs that differ from plain decoding, at most ``MAX_UNEQUAL``.
    """

    pipe: Pipeline
    drafters: Mapping[str, Drafter]
    nodes: str = "default"
    temperatures: Sequence[float] = (0.0, 1.0)
    seeds: int = 1
    max_new_tokens: int = 160
    advance: Callable[[], Any] = lambda: None
    results: dict[Condition, AcceptanceStats] = field(default_factory=dict)
    unequal: list[dict[str, Any]] = field(default_factory=list)

    def num_answers(self, counts: Mapping[str, int]) -> int:
        """Approximate number of answers to decode, for a progress bar, given the conversations per suite."""
        trees = sum(len(tree_sizes(drafter, self.nodes)) for drafter in self.drafters.values())
        rounds = sum(self.seeds if temperature > 0 else 1 for temperature in self.temperatures)
        answers = sum(count * (3 if name == "turns" else 1) for name, count in counts.items())
        return answers * rounds * (1 + trees)

    def run(self, suite: str, conversations: Sequence[Conversation]) -> None:
        """Decode a suite's conversations plainly and with every drafter and tree size."""
        requests, groups, greedy = self._greedy_answers(conversations)
        for temperature in self.temperatures:
            for turn in range(self.seeds if temperature > 0 else 1):
                settings = {"temperature": temperature, **UNFILTERED, "max_new_tokens": self.max_new_tokens}
                options = [{**settings, "seed": 1_000_000 * turn + index} for index in range(len(requests))]
                expected = greedy if temperature == 0 else self._plain_answers(requests, options)
                for label, drafter in self.drafters.items():
                    for size, nodes in tree_sizes(drafter, self.nodes).items():
                        condition = Condition(suite, temperature, label, size, nodes)
                        self._decode(condition, list(zip(groups, requests, options, expected, strict=True)))

    def _greedy_answers(
        self, conversations: Sequence[Conversation]
    ) -> tuple[list[dict[str, Any]], list[int], list[list[int]]]:
        """Answer all turns greedily: the history of each next turn is the target's own answer.

        Returns:
            The measured requests, the index of each one's conversation, and the tokens of its greedy answer.
        """
        requests, groups, tokens = [], [], []
        for index, conversation in enumerate(conversations):
            answers: list[str] = []
            for turn in range(len(conversation.questions)):
                request = conversation.request(answers)
                answer = self.pipe.generate(**request, max_new_tokens=self.max_new_tokens, temperature=0.0)
                answers.append(answer.text)
                if turn >= conversation.counted:
                    requests.append(request)
                    groups.append(index)
                    tokens.append(answer.token_ids)
                self.advance()
        return requests, groups, tokens

    def _plain_answers(self, requests: Sequence[dict[str, Any]], options: Sequence[dict[str, Any]]) -> list[list[int]]:
        answers = []
        for request, keywords in zip(requests, options, strict=True):
            answers.append(self.pipe.generate(**request, **keywords).token_ids)
            self.advance()
        return answers

    def _decode(
        self, condition: Condition, cases: Sequence[tuple[int, dict[str, Any], dict[str, Any], list[int]]]
    ) -> None:
        """Decode all cases of a condition: (conversation, request, options, expected tokens) each."""
        drafter = ProfiledDrafter(fork(self.drafters[condition.drafter], self.pipe.target), count_forwards=True)
        speculative = Pipeline(self.pipe.target, self.pipe.io, drafter)
        stats = self.results.setdefault(condition, AcceptanceStats())
        for index, (group, request, keywords, expected) in enumerate(cases):
            answer = speculative.generate(**request, nodes=condition.nodes, **keywords)
            equal = answer.token_ids == expected
            stats.add((condition.suite, group), answer.stats, equal)
            if not equal and len(self.unequal) < MAX_UNEQUAL:
                where = first_difference(self.pipe, request, keywords, answer.token_ids, expected)
                self.unequal.append({**vars(condition), "request": index, **vars(where)})
            self.advance()
        stats.add_profile(drafter)


def with_totals(results: Mapping[Condition, AcceptanceStats]) -> dict[Condition, AcceptanceStats]:
    """Results ordered by temperature, each temperature followed by totals over its suites if there are several."""
    totals: dict[Condition, AcceptanceStats] = {}
    for condition, stats in results.items():
        total = Condition("all", *list(vars(condition).values())[1:])
        totals[total] = totals.get(total, AcceptanceStats()) + stats
    several = len({condition.suite for condition in results}) > 1
    # Sorting is stable: suites and drafters keep the order in which they were measured, totals come last.
    return dict(sorted({**results, **(totals if several else {})}.items(), key=lambda item: item[0].temperature))


def acceptance_table(results: Mapping[Condition, AcceptanceStats], learners: Sequence[str]) -> Table:
    """One line per suite, temperature, drafter and tree size.

    Args:
        learners: labels of drafters that learn from earlier requests, for the caption.
    """
    last = f"≥{POSITIONS}"
    caption = f"kept: share of accepted draft tokens; ≥d: % of steps that accepted d draft tokens or more ({last} last)"
    if learners:
        caption += f"; {', '.join(learners)}: learning from earlier requests of the same line"
    columns: list[Column] = [
        ("suite", "{suite}"),
        ("T", "{temperature:g}"),
        ("drafter", "{drafter}"),
        ("nodes", "{nodes}"),
        ("acceptance", "{mean_acceptance_length:.2f}"),
        ("kept", percent("draft_acceptance_rate")),
        (f"≥1 .. {last}", _shares_by_position),
        ("passes", "{forwards_per_tree:.1f}"),
        ("equal", "{equal}/{requests}"),
    ]
    rows = [{**vars(condition), **stats.to_dict()} for condition, stats in results.items()]
    title = "tokens per verify step on held-out requests"
    return make_table(columns, rows, sections=("temperature", "suite"), title=title, caption=caption)


def _shares_by_position(row: Mapping[str, Any]) -> str:
    shares = [*row["acceptance_by_position"], *[0.0] * POSITIONS][:POSITIONS]
    return " ".join(f"{100 * share:2.0f}" for share in shares)


def paired_differences(
    results: Mapping[Condition, AcceptanceStats], pairs: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """The difference in acceptance length of each two drafters, for all conditions that differ in nothing else."""
    for first, second in pairs:
        for a, stats in results.items():
            for b, other in results.items():
                alike = (a.suite, a.temperature, a.size) == (b.suite, b.temperature, b.size)
                if (a.drafter, b.drafter) == (first, second) and alike:
                    yield {
                        "suite": a.suite,
                        "temperature": a.temperature,
                        "size": a.size,
                        "first": first,
                        "second": second,
                        **acceptance_difference(stats, other),
                    }


def difference_table(differences: Sequence[dict[str, Any]]) -> Table:
    """One line per paired difference."""
    columns: list[Column] = [
        ("suite", "{suite}"),
        ("T", "{temperature:g}"),
        ("nodes", "{size}"),
        ("drafter", "{first}"),
        ("against", "{second}"),
        ("longer by", "{difference:+.3f}"),
        ("95 % interval", "{low:+.3f} .. {high:+.3f}"),
    ]
    title = "difference in acceptance length, same requests, bootstrap over conversations"
    return make_table(columns, differences, title=title)
