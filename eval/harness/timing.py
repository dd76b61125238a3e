"""Ways of decoding in turn on the same prompts, in one process, several rounds: the source of all figures of speed."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any

import torch

from eval.harness.drafters import Watched
from eval.harness.memory import peak, start_watching
from mmspec.budget import AdaptiveBudget
from mmspec.drafter import Drafter, lend
from mmspec.pipeline import Pipeline
from mmspec.stats import Stats
from mmspec.transformers_target import TransformersTarget

TRANSFORMERS, PLAIN = "transformers generate", "mmspec, no drafter"


PARTS = ("prefill", "draft", "verify", "commit")
"""What a request's time is split into; the rest is preprocessing, stopping rules and text."""


@dataclass(frozen=True)
class Asked:
    """How answers are decoded: as for ``Pipeline.generate``."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One batch of answers.

    Attributes:
        answers: their tokens, row by row.
        stats: row by row; of transformers the acceptance lengths alone, and nothing of several rows.
        seconds: by what they were spent on: ``total``, ``decoding`` (behind the first token), ``PARTS`` where they are
            known, ``tree`` (to draft one) and ``pass`` (to verify once), the means of the answer's steps.
        memory: bytes at the peak, see ``eval.harness.memory``.
    """

    answers: list[list[int]]
    stats: list[Stats]
    seconds: dict[str, float]
    memory: int | None = None

    @property
    def length(self) -> float:
        """Mean acceptance length of the first row."""
        return self.stats[0].mean_acceptance_length if self.stats else 1.0


@dataclass
class Way:
    """One way of decoding, and what it took.

    Attributes:
        name: in tables.
        drafter, nodes: who drafts, and how many nodes; None adapts them.
        target: who verifies; None is the pipeline's target.
        options: of transformers' ``generate``, which then decodes by itself; None is our engine.
        budgets: what adaptive budgets have learnt.
        seconds: for each prompt, medians over the rounds, as ``Run`` names them.
        lengths: for each prompt, the mean acceptance length.
        answers: for each prompt, the tokens.
        tokens: for each prompt, how many these are.
        equal: prompts whose tokens were those of the way that is compared with, see ``measure``.
    """

    name: str
    drafter: Drafter | None = None
    nodes: int | None = 0
    target: TransformersTarget | None = None
    options: dict[str, Any] | None = None
    budgets: dict[int, AdaptiveBudget] = field(default_factory=dict)
    seconds: list[dict[str, float]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    equal: int = 0

    def __post_init__(self) -> None:
        if self.name == TRANSFORMERS and self.options is None:
            self.options = {}

    def fork(self, target: TransformersTarget) -> Way:
        """The same way, unmeasured, that learns on its own from what this one has learnt."""
        drafter, budgets = lend(self.drafter, target), copy.deepcopy(self.budgets)
        return Way(self.name, drafter, self.nodes, self.target, self.options, budgets)

    def clear(self) -> None:
        """Forget what was measured; drafter and budget keep what they learnt."""
        self.seconds, self.lengths, self.answers, self.tokens, self.equal = [], [], [], [], 0

    def column(self, name: str) -> list[float]:
        """One of the times, by prompt."""
        return [seconds[name] for seconds in self.seconds]


def ratios(slow: Way, fast: Way, name: str) -> list[float]:
    """How much longer ``slow`` takes per token, by prompt.

    Args:
        name: ``total``, over all new tokens, or ``decoding``, over those after the first. Prompts of which an answer
            has no such tokens are left out.
    """
    first = 0 if name == "total" else 1
    spent = [zip(way.column(name), (count - first for count in way.tokens), strict=True) for way in (slow, fast)]
    return [a * n / (b * m) for (a, m), (b, n) in zip(*spent, strict=True) if min(m, n) > 0]


def measure(
    pipe: Pipeline,
    requests: Sequence[dict[str, Any]],
    ways: Sequence[Way],
    rounds: int,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> None:
    """Decode every request in every way, in turn, and fill ``ways`` with medians over the rounds.

    Answers are compared with those of the first way; sampled ones with the first of ours, as the same seed gives other
    draws in transformers.
    """
    asked = Asked(max_new_tokens, temperature)
    reference = ways[0] if temperature == 0 else next(way for way in ways if way.options is None)
    for request in requests:
        runs = rounds_of(pipe, [request], ways, rounds, asked)
        expected = runs[reference.name][0].answers[0]
        for way in ways:
            first = runs[way.name][0]
            way.equal += first.answers[0] == expected
            way.lengths.append(first.length)
            way.answers.append(first.answers[0])
            way.tokens.append(len(first.answers[0]))
            each = [run.seconds for run in runs[way.name]]
            way.seconds.append({name: statistics.median(s[name] for s in each) for name in each[0]})


def rounds_of(
    pipe: Pipeline, requests: Sequence[dict[str, Any]], ways: Sequence[Way], rounds: int, asked: Asked
) -> dict[str, list[Run]]:
    """Decode a batch of requests in every way, in turn, several rounds; the ways learn from the last one.

    Returns:
        The runs of each way, in the order of the rounds.
    """
    runs: dict[str, list[Run]] = {way.name: [] for way in ways}
    for turn in range(rounds):
        # The order rotates, so that no way always runs behind the same one.
        shift = turn % len(ways) if turn else 0
        for way in [*ways[shift:], *ways[:shift]]:
            runs[way.name].append(_decode(pipe, way, requests, asked, turn == rounds - 1))
    return runs


def _decode(pipe: Pipeline, way: Way, requests: Sequence[dict[str, Any]], asked: Asked, last: bool) -> Run:
    start_watching(pipe.target.device)
    if way.options is not None:
        return _generate(pipe, way.options, requests, asked)
    target = pipe.target if way.target is None else way.target
    drafter = way.drafter if last else lend(way.drafter, target)
    watched = None if drafter is None else Watched(drafter)
    mine = Pipeline(target, watched)
    mine.budgets = way.budgets if last else copy.deepcopy(way.budgets)
    start = clock()
    results = mine.generate_batch(requests, **vars(asked), nodes=way.nodes)
    total = clock() - start
    longest = max((result.stats for result in results), key=lambda stats: stats.num_spec_steps)
    wall = max(result.stats.wall_seconds for result in results)
    seconds = {
        "total": total,
        "decoding": wall - longest.time_to_first_token,
        # The rows of a batch share their steps: the one that took most of them tells what all took.
        **{part: getattr(longest, f"{part}_seconds") for part in PARTS},
        "tree": 0.0 if watched is None else watched.seconds / max(watched.proposals, 1),
        "pass": longest.verify_seconds / max(longest.num_spec_steps, 1),
    }
    answers = [result.token_ids for result in results]
    return Run(answers, [result.stats for result in results], seconds, peak(target.device))


def _generate(pipe: Pipeline, options: dict[str, Any], requests: Sequence[dict[str, Any]], asked: Asked) -> Run:
    sampling: dict[str, Any] = {"do_sample": False}
    if asked.temperature > 0:
        torch.manual_seed(asked.seed)
        sampling = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
    start = clock()
    prompt = pipe.target.encode(requests)
    ids = prompt.input_ids
    mask = torch.ones_like(ids) if prompt.attention_mask is None else prompt.attention_mask
    watch = _Watch()
    inputs = {"input_ids": ids, "attention_mask": mask, **prompt.inputs, **sampling, **options}
    out = pipe.model.generate(**inputs, max_new_tokens=asked.max_new_tokens, streamer=watch)
    end = clock()
    answers = [_ended(row, pipe.target.eos_token_ids) for row in out[:, ids.shape[1] :].tolist()]
    stats = [watch.stats] if len(answers) == 1 else []
    return Run(answers, stats, {"total": end - start, "decoding": end - watch.at}, peak(ids.device))


def _ended(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """A row without the padding behind its end."""
    return next((tokens[: at + 1] for at, token in enumerate(tokens) if token in eos), tokens)


class _Watch:
    """A streamer that only notes when the first new tokens came, and how many each pass of the target gave."""

    def __init__(self) -> None:
        self.at = 0.0
        self.stats = Stats()
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the prompt comes first
            self.at = clock()
        elif self._calls > 2:
            self.stats.record_step(0, 0, value.numel() - 1, value.numel())

    def end(self) -> None:
        """Nothing is held back."""
