"""Races: several methods answer one request, interleaved and timed separately."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.compare import Difference, first_difference
from mmspec.demos.models import LoadedModel
from mmspec.demos.streaming import StreamedAnswer, resolved, stream_answer
from mmspec.drafters.registry import PLAIN
from mmspec.errors import UserError

_WARM_UP = 8  # tokens


@dataclass
class Race:
    """Answers of several methods to one request. The comparison is set when all are complete.

    Attributes:
        lanes: an answer per method.
        equal: whether the tokens of all lanes are equal.
        difference: the first difference of a lane from the first lane, if any.
        ahead: number of requests before this one; None once it runs.
    """

    lanes: list[StreamedAnswer]
    equal: bool | None = None
    difference: Difference | None = None
    ahead: int | None = None

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

    def decode_speedup(self, lane: StreamedAnswer) -> float | None:
        """The same of the decode phase; None for answers of one token."""
        assert lane.stats is not None
        assert self.baseline.stats is not None
        slow, fast = self.baseline.stats.tokens_per_second, lane.stats.tokens_per_second
        return fast / slow if slow and fast else None


def race(
    loaded: LoadedModel, methods: Sequence[str], request: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Iterator[Race]:
    """Answer a request with several methods, interleaved step by step and timed separately.

    The method that has used least time so far takes the next step, so that all run under the same conditions and
    none slows another down; nothing else may decode meanwhile. All are warmed up first.

    Raises:
        UserError: two methods are the same drafter, or one cannot be made for this model.
    """
    pipes = {}
    for method in methods:
        pipe = loaded.pipeline(method)
        name = resolved(method, pipe)
        if name in pipes:
            raise UserError(f"a race compares different methods: got {name} twice, as {method!r} is {name}")
        pipes[name] = pipe
    for pipe in pipes.values():
        pipe.generate(**request, **{**keywords, "max_new_tokens": min(_WARM_UP, keywords["max_new_tokens"])})
    running = {name: stream_answer(pipe, name, request, keywords) for name, pipe in pipes.items()}
    lanes = {name: StreamedAnswer(loaded.name, name) for name in pipes}
    result = Race(list(lanes.values()))
    while running:
        name = min(running, key=lambda lane: lanes[lane].seconds)
        answer = next(running[name], None)
        if answer is None:
            del running[name]
        else:
            lanes[name] = answer
            result.lanes = list(lanes.values())
            yield result
    _compare(result, loaded, request, keywords)
    yield result


def _compare(result: Race, loaded: LoadedModel, request: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    first, *others = result.lanes
    unequal = next((lane for lane in others if lane.token_ids != first.token_ids), None)
    if unequal is not None:
        tokens = unequal.token_ids, first.token_ids
        result.difference = first_difference(loaded.open(PLAIN), request, keywords, *tokens)
    result.equal = unequal is None
