"""Answers with their times, races, and the races that tabs open on."""

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
from mmspec.demos.catalog import make_catalog
from mmspec.demos.chat_request import ChatRequest
from mmspec.demos.models import ModelCache, RequestQueue
from mmspec.demos.racing import Race, StreamedAnswer, race, stream_answer
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder
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


def test_lanes_are_compared_with_plain_decoding_or_else_the_slowest() -> None:
    for methods in (*permutations(METHODS, 3), *permutations(METHODS, 2)):
        race = Race([lane(method) for method in methods])
        baseline = "none" if "none" in methods else max(methods, key=METHODS.__getitem__)
        assert race.baseline.drafter == baseline
        assert race.fastest.drafter == min(set(methods) - {baseline}, key=METHODS.__getitem__)
        for one in race.lanes:
            speedup = pytest.approx(METHODS[baseline] / METHODS[one.drafter])
            assert (race.speedup(one), race.decode_speedup(one)) == (speedup, speedup)
    race = Race([lane("ngram", 2.0), lane("recycle", 2.0)])
    assert race.baseline is not race.fastest
    assert race.speedup(race.fastest) == 1.0


def test_answers_of_one_token_have_no_speed_of_decoding() -> None:
    for tokens in (1, 2):
        race = Race([lane("none", tokens=tokens), lane("msd", tokens=tokens)])
        assert (race.decode_speedup(race.fastest) is None) == (tokens == 1)


@pytest.mark.parametrize(("limit", "tokens"), [(5, 5), (64, 8)])
def test_all_methods_are_warmed_up_once(monkeypatch: pytest.MonkeyPatch, limit: int, tokens: int) -> None:
    calls: dict[str, list[int]] = {"none": [], "msd": []}
    pipes = {
        name: SimpleNamespace(generate=lambda name=name, **given: calls[name].append(given["max_new_tokens"]))
        for name in calls
    }
    loaded = SimpleNamespace(name="tiny", pipeline=pipes.__getitem__, open=None)
    monkeypatch.setattr(racing, "resolved", lambda method, pipe: method)
    monkeypatch.setattr(racing, "stream_answer", lambda pipe, name, *_: iter([lane(name)]))
    *_, last = race(loaded, list(calls), {"prompt": "Hi"}, {"max_new_tokens": limit})  # type: ignore[arg-type]
    assert last.equal
    assert calls == {"none": [tokens], "msd": [tokens]}


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

    def difference(pipe: Any, request: Any, keywords: Any, fast: list[int], slow: list[int]) -> Difference:
        return Difference(int(fast[0] == slow[0]), fast[-1], slow[-1], 0.5)

    monkeypatch.setattr(racing, "resolved", lambda method, pipe: method)
    monkeypatch.setattr(racing, "stream_answer", answers)
    monkeypatch.setattr(racing, "first_difference", difference)
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
    assert (last.equal, last.difference) == (False, Difference(1, 3, 2, 0.5))


def test_seconds_are_those_of_preprocessing_and_of_the_engine(monkeypatch):
    """Of 2 s until the first piece, the engine took 0.5; a consumer that takes hours does not count."""
    now = [100.0]
    monkeypatch.setattr(racing, "clock", lambda: now[0])

    def stream(**_):
        now[0] += 2.0
        yield Piece("A", [65], seconds=0.5)
        yield Piece("B", [66], "stop", Stats(), seconds=0.75)

    io = Processor(byte_tokenizer())
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


class _Timed(Service):
    """Races of two lanes whose speedups are given."""

    def _race(self, chat, methods):
        self.raced.append(chat.kind)
        lanes = [StreamedAnswer("tiny", name, seconds=1.0) for name in ("none", "msd")]
        yield Race(lanes)
        lanes[0].seconds = next(self.speedups)
        yield Race(lanes, equal=True, runs=3)


@pytest.mark.parametrize(("speedups", "shown"), [([1.5], 1.5), ([1.02, 1.5], 1.5), ([0.5, 0.9], 0.9)])
def test_opening_race_that_does_not_pay_is_repeated_once(tmp_path, speedups, shown):
    service = _Timed(SimpleNamespace(turns=RequestQueue()), make_catalog(["tiny-llava"]), UploadFolder(tmp_path, 2**20))
    service.raced, service.speedups = [], iter([*speedups, 2.0])
    for _ in range(2):  # the second visitor gets the first one's
        *_, race = service.opening(ChatRequest("text", "Hello"))
        assert race.speedup(race.fastest) == shown
    assert service.raced == ["text"] * len(speedups)
    *_, other = service.opening(ChatRequest("image", "Describe the image."))
    assert other.speedup(other.fastest) == 2.0  # each kind has its own


def test_visitor_during_the_opening_race_gets_its_result(tmp_path):
    service = _Timed(SimpleNamespace(turns=RequestQueue()), make_catalog(["tiny-llava"]), UploadFolder(tmp_path, 2**20))
    service.raced, service.speedups = [], iter([1.5, 2.0])
    first, second = (service.opening(ChatRequest("text", "Hello")) for _ in range(2))
    next(first)
    assert next(second).ahead == 1
    list(first)
    *_, race = second
    assert race.speedup(race.fastest) == 1.5
    assert service.raced == ["text"]


def test_a_race_begins_at_once_after_a_warm_up(tmp_path, monkeypatch):
    """Its pipelines are made, and have read the prompt."""
    models = ModelCache(device="cpu")
    service = Service(models, make_catalog(["tiny-hybrid"]), UploadFolder(tmp_path, 2**20))
    chat = ChatRequest("text", "Describe the room.", max_new_tokens=4)
    service.warm_up(chat)
    made: list[str] = []
    loaded = models.get("tiny-hybrid")
    monkeypatch.setattr(loaded, "open", made.append)
    *_, race = service.opening(chat)
    assert made == []
    assert [len(lane.token_ids) for lane in race.lanes] == [4, 4]
