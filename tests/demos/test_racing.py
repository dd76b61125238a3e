"""Answers with their times, and races."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from mmspec import Pipeline
from mmspec.compare import Difference
from mmspec.demos import racing
from mmspec.demos.racing import Race, StreamedAnswer, race, stream_answer
from mmspec.engine.stats import Stats
from mmspec.pipeline import Piece
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

METHODS = {"none": 3.0, "ngram": 4.0, "recycle": 1.0, "msd": 2.0}


def lane(method: str, seconds: float | None = None, tokens: int = 9) -> StreamedAnswer:
    """An answer that took ``seconds``, of which a tenth was prefill."""
    seconds = METHODS[method] if seconds is None else seconds
    stats = Stats(wall_seconds=seconds, time_to_first_token=seconds / 10, prefill_seconds=seconds / 10)
    stats.num_generated_tokens = 1
    for _ in range(tokens - 1):
        stats.record_step(0, 0, 0, 1)
    return StreamedAnswer("tiny", method, seconds=seconds, stats=stats)


@pytest.mark.parametrize("methods", list(permutations(METHODS, 3)) + list(permutations(METHODS, 2)))
def test_lanes_are_compared_with_plain_decoding_or_else_the_slowest(methods: tuple[str, ...]) -> None:
    race = Race([lane(method) for method in methods])
    baseline = "none" if "none" in methods else max(methods, key=METHODS.__getitem__)
    others = [method for method in methods if method != baseline]
    assert race.baseline.drafter == baseline
    assert race.fastest.drafter == min(others, key=METHODS.__getitem__)
    for one in race.lanes:
        assert race.speedup(one) == pytest.approx(METHODS[baseline] / METHODS[one.drafter])
        assert race.decode_speedup(one) == pytest.approx(METHODS[baseline] / METHODS[one.drafter])
    if baseline != "none":
        assert all(race.speedup(one) >= 1 for one in race.lanes)


def test_two_lanes_that_took_the_same_time() -> None:
    race = Race([lane("ngram", 2.0), lane("recycle", 2.0)])
    assert race.baseline is not race.fastest
    assert race.speedup(race.fastest) == 1.0


@pytest.mark.parametrize(("tokens", "known"), [(1, False), (2, True)])
def test_answers_of_one_token_have_no_speed_of_decoding(tokens: int, known: bool) -> None:
    race = Race([lane("none", tokens=tokens), lane("msd", tokens=tokens)])
    assert (race.decode_speedup(race.fastest) is not None) is known


@pytest.mark.parametrize(("equal", "finished"), [(None, False), (False, True), (True, True)])
def test_a_race_has_ended_when_it_is_compared(equal: bool | None, finished: bool) -> None:
    assert Race([lane("none"), lane("msd")], equal).finished is finished


class _Recorded:
    """A pipeline that records the calls of ``generate``, each of which fails."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def generate(self, *, max_new_tokens: int, **request: Any) -> None:
        self.calls.append(max_new_tokens)
        if len(self.calls) > 1:
            raise AssertionError("warmed up twice")


@pytest.mark.parametrize(("limit", "tokens"), [(5, 5), (64, 8)])
def test_all_methods_are_warmed_up(monkeypatch: pytest.MonkeyPatch, limit: int, tokens: int) -> None:
    pipes = {name: _Recorded() for name in ("none", "msd")}
    loaded = SimpleNamespace(name="tiny", pipeline=pipes.__getitem__, open=None)
    monkeypatch.setattr("mmspec.demos.racing.resolved", lambda method, pipe: method)
    monkeypatch.setattr("mmspec.demos.racing.stream_answer", lambda pipe, name, *_: iter([lane(name)]))
    *_, last = race(loaded, ["none", "msd"], {"prompt": "Hi"}, {"max_new_tokens": limit})  # type: ignore[arg-type]
    assert last.equal
    assert [pipe.calls for pipe in pipes.values()] == [[tokens], [tokens]]


def raced(monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]], tokens: Sequence[int] = ()) -> list[Race]:
    """Race methods whose answers take the given seconds, run by run; ``tokens`` are those of all answers in turn."""
    pipes = {name: SimpleNamespace(generate=lambda **_: None, left=iter(times[name])) for name in times}
    loaded = SimpleNamespace(name="tiny", pipeline=pipes.__getitem__, open=lambda _: None)
    last, running = iter(tokens), set()

    def answers(pipe: Any, name: str, *_: Any) -> Iterator[StreamedAnswer]:
        assert not running  # each answers alone
        running.add(name)
        yield StreamedAnswer("tiny", name)
        answer = lane(name, next(pipe.left))
        answer.token_ids = [1, next(last, 2)]
        yield answer
        running.remove(name)

    monkeypatch.setattr("mmspec.demos.racing.resolved", lambda method, pipe: method)
    monkeypatch.setattr("mmspec.demos.racing.stream_answer", answers)
    monkeypatch.setattr("mmspec.demos.racing.first_difference", lambda *_: Difference(1, 2, 3, 0.5))
    return [replace(one) for one in race(loaded, list(times), {}, {"max_new_tokens": 2})]  # type: ignore[arg-type]


def test_lanes_are_the_median_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    states = raced(monkeypatch, {"none": [9.0, 2.0, 4.0], "msd": [1.0, 8.0, 2.0]})
    assert [lane.seconds for lane in states[-1].lanes] == [4.0, 2.0]
    assert (states[-1].runs, states[-1].equal, states[-1].pays) == (3, True, True)
    first = next(state for state in states if state.finished)
    assert (first.runs, first.equal) == (1, True)  # complete after the first run
    assert not Race([lane("none", 1.05), lane("msd", 1.0)]).pays


def test_a_difference_in_any_run_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    last = raced(monkeypatch, {"none": [1.0] * 3, "msd": [1.0] * 3}, tokens=[2, 2, 2, 2, 2, 3])[-1]
    assert (last.equal, last.difference) == (False, Difference(1, 2, 3, 0.5))


def test_seconds_are_those_of_preprocessing_and_of_the_engine(monkeypatch):
    """Of 2 s until the first piece, the engine took 0.5; a consumer that takes hours does not count."""
    now = [100.0]
    monkeypatch.setattr(racing, "clock", lambda: now[0])

    def stream(**_):
        now[0] += 2.0
        yield Piece("A", [65], seconds=0.5)
        yield Piece("B", [66], "stop", Stats(), seconds=0.75)

    io = SimpleNamespace(tokenizer=SimpleNamespace(decode=str), decode=lambda ids: "AB"[: len(ids)])
    pipe = SimpleNamespace(name="tiny", io=io, drafter=None, stream=stream)
    seconds = []
    for answer in stream_answer(pipe, "none", {}, {"max_new_tokens": 9}):
        seconds.append(answer.seconds)
        now[0] += 3600
    assert seconds == [2.0, 2.25]
    assert answer.pass_ends == [2.0, 2.25]
    assert answer.limit == 9


def test_pieces_have_the_seconds_of_the_engine():
    pipe = Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), None, "tiny")
    seconds = [piece.seconds for piece in pipe.stream("abcabc", max_new_tokens=9, temperature=0.0)]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1]
