"""Model cache, requests that decode together, races, and opening races."""

from __future__ import annotations

import asyncio
import gc
import weakref
from itertools import permutations
from threading import Thread
from types import SimpleNamespace

import pytest

from mmspec import Pipeline, UserError
from mmspec.adaptation import AdaptOptions
from mmspec.compare import Difference
from mmspec.demos import models as models_module
from mmspec.demos import racing
from mmspec.demos.catalog import Catalog
from mmspec.demos.chat_request import ChatRequest
from mmspec.demos.models import LoadedModel, ModelCache
from mmspec.demos.racing import Race, StreamedAnswer, race, resolved, stream_answer
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder
from mmspec.engine.stats import Stats
from mmspec.pipeline import Piece
from mmspec.serving import middleware
from mmspec.serving.middleware import RequestQueue
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

REQUEST = {"prompt": "abcabcabd", "max_new_tokens": 40, "temperature": 0.0, "seed": 0}


def opened(name="bytes"):
    target = TransformersTarget(byte_model())
    return Pipeline(target, Processor(byte_tokenizer()), None, name)


@pytest.fixture
def models(monkeypatch):
    loaded = []

    def open_pipeline(views, model, drafter, device, dtype, generation_config, warm_up, mmproj):
        assert mmproj is None
        if model == "nobody/nothing":
            raise UserError("cannot load model 'nobody/nothing'")
        loaded.append(model)
        return opened(model)

    monkeypatch.setattr(models_module, "open_pipeline", open_pipeline)
    monkeypatch.setattr(middleware, "_POLL", 0.01)
    made = ModelCache(capacity=2)
    made.loaded = loaded
    return made


def test_least_recently_used_models_are_evicted(models):
    first = models.get("a")
    assert models.get("b") is not first
    assert models.get("a") is first
    gone = weakref.ref(models.get("b").target)
    models.get("a")
    models.get("c")
    gc.collect()
    assert gone() is None
    assert models.loaded == ["a", "b", "c"]
    with pytest.raises(UserError, match="nobody"):
        models.get("nobody/nothing")
    with pytest.raises(UserError, match="choose a model"):
        models.get("")
    kept = models.keep("c", "recycle")
    for name in "de":
        models.get(name)
    for drafter in ("none", *(f"recycle{'+ngram' * count}" for count in range(1, 9))):
        models.get("c").pipeline(drafter)
    assert models.get("c").pipeline("recycle") is kept
    assert models.loaded == ["a", "b", "c", "d", "e"]
    adapting = models.keep("c", "recycle", AdaptOptions())
    assert adapting is not kept
    assert (adapting.adaptation is None, kept.adaptation is None) == (False, True)
    assert kept.target.model is adapting.target.model


def test_requests_do_not_share_learned_drafts():
    loaded = LoadedModel(opened())
    for name in ("recycle", "auto"):
        pipe = loaded.pipeline(name)
        assert loaded.pipeline(name) is pipe
        first, again = (pipe.generate(**REQUEST, nodes=6, trace=True) for _ in range(2))
        assert first.trees == again.trees
        assert first.stats.num_draft_tokens > 0
    assert loaded.pipeline("none").drafter is None
    names = [resolved("auto", loaded.pipeline(name)) for name in ("auto", "none", "recycle+ngram")]
    assert names == ["recycle+ngram", "none", "recycle+ngram"]
    with pytest.raises(UserError, match="drafter"):
        loaded.pipeline("nonsense")


def test_a_race_runs_alone_and_the_queue_has_an_end(models):
    """It waits for earlier requests, and later requests wait for it."""
    started = {
        name: models.turns.run(iter("xy"), lambda ahead: ahead, alone=name == "race")
        for name in ("a", "b", "race", "c")
    }
    assert [next(started[name]) for name in ("a", "b", "race", "c")] == ["x", "x", 2, 3]
    assert list(started["a"]) == ["y"]
    assert next(started["race"]) == 1
    started["b"].close()
    assert [next(started["race"]), next(started["c"])] == ["x", 1]
    assert list(started["race"]) == ["y"]
    assert list(started["c"]) == ["x", "y"]
    requests = [models.turns.run(iter("ab"), lambda _: "waiting", alone=alone) for alone in (False, True, False)]
    assert [next(request) for request in requests] == ["a", "waiting", "waiting"]
    requests[1].close()  # it has been cancelled
    assert list(requests[2]) == ["a", "b"]
    requests[0].close()
    turns = RequestQueue(2, 1)
    running, other, third, fourth = (turns.run(iter("ab"), lambda ahead: ahead) for _ in range(4))
    assert [next(running), next(other), next(third)] == ["a", "a", 2]
    with pytest.raises(UserError, match=r"busy with 3 requests: try again"):
        next(fourth)
    running.close()
    assert list(third) == ["a", "b"]


def test_a_request_may_end_while_another_starts():
    """As by garbage collection, in the same thread."""

    def scenario():
        turns = RequestQueue(2, 3)
        race, waiting, last = turns.join(alone=True), turns.join(), turns.join()
        waiting[0].add_done_callback(lambda _: turns.leave(waiting))
        turns.leave(race)
        started.append(last[0].done())

    started = []
    thread = Thread(target=scenario, daemon=True)
    thread.start()
    thread.join(10)
    assert started == [True]


def test_choices_of_the_api_and_a_race_wait_for_each_other():
    async def scenario():
        turns = RequestQueue(3, 3)
        page = turns.join()
        await turns.acquire(2)
        race, later = turns.join(alone=True), asyncio.ensure_future(turns.acquire(1))
        await asyncio.sleep(0.01)
        turns.release(2)
        assert not race[0].done()
        turns.leave(page)
        assert race[0].done()
        await asyncio.sleep(0.05)
        assert (later.done(), turns.running, turns.waiting) == (False, 0, 1)
        turns.leave(race)
        await asyncio.wait_for(later, 60)
        assert (turns.running, turns.waiting) == (1, 0)

    asyncio.run(scenario())


def test_race_tokens_equal_separate_runs():
    loaded, methods = LoadedModel(opened()), ["none", "ngram", "recycle@chain", "ngram@chain"]
    *_, end = race(loaded, methods, REQUEST)
    alone = opened().generate(**REQUEST)
    assert (end.finished, end.equal, end.difference) == (True, True, None)
    assert [lane.drafter for lane in end.lanes] == methods
    for lane in end.lanes:
        assert (lane.token_ids, lane.text, lane.model, lane.limit) == (alone.token_ids, alone.text, "bytes", 40)
        assert lane.passes == lane.stats.num_spec_steps
        assert lane.pass_ends == sorted(lane.pass_ends)
    assert (end.lanes[0].steps, len(end.lanes[1].steps)) == ([], end.lanes[1].passes)
    assert all(tree.parents == list(range(-1, len(tree.parents) - 1)) for lane in end.lanes[2:] for tree in lane.steps)
    with pytest.raises(UserError, match="got recycle\\+ngram twice"):
        next(race(loaded, ["recycle+ngram", "auto"], REQUEST))


METHODS = {"none": 3.0, "ngram": 4.0, "recycle": 1.0, "msd": 2.0}


def lane(method, seconds=None, tokens=9):
    """An answer that took ``seconds``, of which a tenth was prefill."""
    seconds = METHODS[method] if seconds is None else seconds
    stats = Stats(wall_seconds=seconds, time_to_first_token=seconds / 10, prefill_seconds=seconds / 10)
    for _ in range(tokens - 1):
        stats.record_step(0, 0, 0, 1)
    return StreamedAnswer("tiny", method, seconds=seconds, stats=stats)


def test_lanes_are_compared_with_plain_decoding_or_else_the_slowest():
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
    for tokens in (1, 2):  # answers of one token have no decoding speed
        race = Race([lane("none", tokens=tokens), lane("msd", tokens=tokens)])
        assert (race.decode_speedup(race.fastest) is None) == (tokens == 1)


@pytest.mark.parametrize(("last", "difference", "limit"), [(2, None, 5), (3, Difference(1, 3, 2, 0.5), 64)])
def test_a_race_shows_median_runs_after_a_warm_up(monkeypatch, last, difference, limit):
    times = {"none": [9.0, 2.0, 4.0], "msd": [1.0, 8.0, 2.0]}
    warmed, running, tokens = [], set(), iter([2] * 5 + [last])

    def pipeline(name):
        return SimpleNamespace(
            generate=lambda **given: warmed.append((name, given["max_new_tokens"])), left=iter(times[name])
        )

    def answers(pipe, name, *_):
        assert not running  # each answers alone
        running.add(name)
        yield StreamedAnswer("tiny", name)
        answer = lane(name, next(pipe.left))
        answer.token_ids = [1, next(tokens)]
        yield answer
        running.remove(name)

    monkeypatch.setattr(racing, "resolved", lambda method, pipe: method)
    monkeypatch.setattr(racing, "stream_answer", answers)
    monkeypatch.setattr(racing, "first_difference", lambda *given: Difference(1, given[3][-1], given[4][-1], 0.5))
    loaded = SimpleNamespace(name="tiny", pipeline=pipeline, open=lambda _: None)
    states = []
    for end in race(loaded, list(times), {"max_new_tokens": limit}):
        states.append((end.runs, end.equal))
    assert warmed == [("none", min(limit, 8)), ("msd", min(limit, 8))]
    assert (1, True) in states  # complete after the first run
    assert states[-1] == (3, difference is None)
    assert ([one.seconds for one in end.lanes], end.difference) == ([4.0, 2.0], difference)


def test_seconds_are_those_of_preprocessing_and_of_the_engine(monkeypatch):
    """Of 2 s until the first piece, the engine took 0.5; a consumer that takes hours does not count."""
    now = [100.0]
    monkeypatch.setattr(racing, "clock", lambda: now[0])

    def stream(**_):
        now[0] += 2.0
        yield Piece("A", [65], seconds=0.5, parts=[("", "A")])
        yield Piece("B", [66], "stop", Stats(), seconds=0.75, parts=[("", "B"), ("", "")])

    pipe = SimpleNamespace(name="tiny", drafter=None, stream=stream)
    for answer in stream_answer(pipe, "none", {"max_new_tokens": 9}):
        now[0] += 3600 * answer.limit
    assert (answer.seconds, answer.pass_ends, answer.limit) == (2.25, [2.0, 2.25], 9)
    assert StreamedAnswer("tiny", "none", text="abc", token_ids=[1, 2], seconds=4.0).speed == 0.5


class Timed(Service):
    """Races of two lanes whose speedups are given."""

    def __init__(self, folder, speedups):
        queue = SimpleNamespace(turns=RequestQueue(2, 2))
        super().__init__(queue, Catalog.of(["tiny-llava"]), UploadFolder(folder, 2**20))
        self.speedups = iter([*speedups, 2.0])

    def _race(self, chat, methods):
        lanes = [StreamedAnswer("tiny", name, seconds=1.0) for name in ("none", "msd")]
        yield Race(lanes)
        lanes[0].seconds = next(self.speedups)
        yield Race(lanes, equal=True, runs=3)


@pytest.mark.parametrize(
    ("speedups", "shown"), [([1.5], 1.5), ([1.02, 1.5], 1.5), ([1.05, 1.5], 1.5), ([0.5, 0.9], 0.9)]
)
def test_opening_race_that_does_not_pay_is_repeated_once(tmp_path, speedups, shown):
    service = Timed(tmp_path, speedups)
    first, second = (service.opening(ChatRequest("text", "Hello")) for _ in range(2))
    next(first)
    assert next(second).ahead == 1
    list(first)
    for visit in (second, service.opening(ChatRequest("text", "Hello"))):  # later visitors get the same race
        *_, race = visit
        assert race.speedup(race.fastest) == shown
    *_, other = service.opening(ChatRequest("image", "Describe the image."))
    assert other.speedup(other.fastest) == 2.0  # each kind has its own


def test_a_race_begins_at_once_after_a_warm_up(tmp_path, monkeypatch):
    models = ModelCache(device="cpu")
    service = Service(models, Catalog.of(["tiny-hybrid"]), UploadFolder(tmp_path, 2**20))
    chat = ChatRequest("text", "Describe the room.", max_new_tokens=4)
    service.warm_up(chat)
    monkeypatch.setattr(LoadedModel, "open", None)  # pipelines exist
    *_, race = service.opening(chat)
    assert [len(lane.token_ids) for lane in race.lanes] == [4, 4]
