"""Races: several methods answer one request in turns, several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter as clock
from typing import Any

from mmspec.compare import Difference, first_difference
from mmspec.demos.models import LoadedModel
from mmspec.demos.streaming import StreamedAnswer, resolved, stream_answer
from mmspec.drafters.registry import PLAIN
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline

RUNS = 3
"""Answers of each method, of which a race shows that of median time."""

AS_FAST = 1.05
"""Ratio of times within which two methods are as fast as each other."""

_WARM_UP = 8  # tokens
_PAUSES = 0.05, 0.5  # seconds between updates in the first run and in later ones: consumers slow the methods down


@dataclass
class Race:
    """Answers of several methods to one request. The comparison is set when all are complete for the first time.

    Attributes:
        lanes: an answer per method: of the first run, then the one of median time.
        equal: whether the tokens of all lanes are equal.
        difference: the first difference of a lane from the first lane, if any.
        ahead: number of requests before this one; None once it runs.
        runs: complete runs that the lanes are chosen from.
    """

    lanes: list[StreamedAnswer]
    equal: bool | None = None
    difference: Difference | None = None
    ahead: int | None = None
    runs: int = 0

    @property
    def finished(self) -> bool:
        return self.equal is not None

    @property
    def baseline(self) -> StreamedAnswer:
        """What the other lanes are compared with: plain decoding if it takes part, else the slowest lane."""
        plain = [lane for lane in self.lanes if lane.drafter == PLAIN]
        return plain[0] if plain else max(self.lanes, key=lambda lane: lane.seconds)

    @property
    def fastest(self) -> StreamedAnswer:
        """The fastest lane besides the baseline."""
        return min((lane for lane in self.lanes if lane is not self.baseline), key=lambda lane: lane.seconds)

    def speedup(self, lane: StreamedAnswer) -> float:
        """Seconds of the baseline over those of a lane, image preprocessing and prefill included."""
        return self.baseline.seconds / lane.seconds

    @property
    def pays(self) -> bool:
        """Whether the fastest lane is faster than the baseline by more than chance (``AS_FAST``)."""
        return self.speedup(self.fastest) > AS_FAST

    def decode_speedup(self, lane: StreamedAnswer) -> float | None:
        """The same of the decode phase; None for answers of one token."""
        assert lane.stats is not None
        assert self.baseline.stats is not None
        slow, fast = self.baseline.stats.tokens_per_second, lane.stats.tokens_per_second
        return fast / slow if slow and fast else None


def race(
    loaded: LoadedModel, methods: Sequence[str], request: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Iterator[Race]:
    """Answer a request with several methods ``RUNS`` times; the lanes become each method's median run.

    The methods take turns: each answers alone, once in every run, so that none slows another down and a disturbance
    of the machine meets all; nothing else may decode meanwhile. All are warmed up first. The first run is streamed.

    Raises:
        UserError: two methods are the same drafter, or one cannot be made for this model.
    """
    pipes = warmed_up(loaded, methods, request, keywords)
    result = Race([StreamedAnswer(loaded.name, name) for name in pipes])
    runs: list[list[StreamedAnswer]] = []
    while len(runs) < RUNS:
        lanes: list[StreamedAnswer] = []
        for number, (name, pipe) in enumerate(pipes.items()):
            shown = -inf
            for answer in stream_answer(pipe, name, request, keywords):
                if not runs:
                    result.lanes[number] = answer
                if clock() >= shown + _PAUSES[bool(runs)]:
                    yield result
                    shown = clock()
            lanes.append(answer)
        runs.append(lanes)
        if len(runs) % 2:  # the median of an even number is no run
            result.lanes = [_median(answers) for answers in zip(*runs, strict=True)]
            result.runs = len(runs)
        if result.equal is not False:
            _compare(result, [lane for lanes in runs for lane in lanes], loaded.open, request, keywords)
        yield result


def warmed_up(
    loaded: LoadedModel, methods: Sequence[str], request: Mapping[str, Any], keywords: Mapping[str, Any]
) -> dict[str, Pipeline]:
    """The pipelines by the names of their methods, which must differ; each has begun to answer the request once."""
    pipes: dict[str, Pipeline] = {}
    for method in methods:
        pipe = loaded.pipeline(method)
        name = resolved(method, pipe)
        if name in pipes:
            raise UserError(f"a race compares different methods: got {name} twice, as {method!r} is {name}")
        pipes[name] = pipe
    for pipe in pipes.values():
        pipe.generate(**request, **{**keywords, "max_new_tokens": min(_WARM_UP, keywords["max_new_tokens"])})
    return pipes


def _median(answers: Sequence[StreamedAnswer]) -> StreamedAnswer:
    """The answer of median time among an odd number."""
    return sorted(answers, key=lambda answer: answer.seconds)[len(answers) // 2]


def _compare(
    result: Race,
    answers: Sequence[StreamedAnswer],
    open_pipeline: Callable[[str], Pipeline],
    request: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> None:
    """Set whether the tokens of all answers, of all runs, are equal."""
    first, *others = answers
    unequal = next((answer for answer in others if answer.token_ids != first.token_ids), None)
    if unequal is not None:
        tokens = unequal.token_ids, first.token_ids
        result.difference = first_difference(open_pipeline(PLAIN), request, keywords, *tokens)
    result.equal = unequal is None
