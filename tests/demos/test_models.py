"""Tests of the model cache, of requests that decode together and of races."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Barrier

import pytest

from mmspec import Pipeline, UserError
from mmspec.adaptation.options import AdaptOptions
from mmspec.demos import models as models_module
from mmspec.demos.models import LoadedModel, ModelCache
from mmspec.demos.racing import race, resolved, stream_answer
from mmspec.drafters.recycle import Recycle
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

REQUEST = {"prompt": "abcabcabd"}
KEYWORDS = {"max_new_tokens": 40, "temperature": 0.0, "seed": 0}


def parts():
    """A target and its processor."""
    return TransformersTarget(byte_model()), Processor(byte_tokenizer())


@pytest.fixture
def models(monkeypatch):
    opened = []

    def open_pipeline(views, model, drafter, device, dtype, generation_config, warm_up, mmproj):
        assert mmproj is None
        if model == "nobody/nothing":
            raise UserError("cannot load model 'nobody/nothing'")
        opened.append(model)
        return Pipeline(*parts(), None, model)

    monkeypatch.setattr(models_module, "open_pipeline", open_pipeline)
    monkeypatch.setattr(models_module, "_POLL", 0.01)
    made = ModelCache(capacity=2)
    made.opened = opened
    return made


def test_least_recently_used_model_is_evicted(models):
    first = models.get("a")
    assert models.get("b") is not first
    assert models.get("a") is first
    gone = weakref.ref(models.get("b").target)
    models.get("a")
    models.get("c")
    gc.collect()
    assert gone() is None
    assert len(models) == 2
    assert models.opened == ["a", "b", "c"]
    with pytest.raises(UserError, match="nobody"):
        models.get("nobody/nothing")
    with pytest.raises(UserError, match="choose a model"):
        models.get("")


def test_what_is_kept_is_not_evicted(models):
    kept = models.keep("a", "recycle")
    for name in "bcd":
        models.get(name)
    assert len(models) == 2
    for drafter in ("none", *(f"recycle{'+ngram' * count}" for count in range(1, 9))):
        models.get("a").pipeline(drafter)
    assert models.get("a").pipeline("recycle") is kept
    assert models.opened == ["a", "b", "c", "d"]


def test_an_adapting_pipeline_is_not_the_pages(models):
    adapting, own = models.keep("a", "recycle", AdaptOptions()), models.get("a").pipeline("recycle")
    assert own is not adapting
    assert (adapting.adaptation is None, own.adaptation is None) == (False, True)
    assert own.target.model is adapting.target.model


def test_requests_do_not_share_learned_drafts():
    loaded = LoadedModel(*parts(), "bytes")
    for name in ("recycle", "auto"):
        pipe = loaded.pipeline(name)
        assert loaded.pipeline(name) is pipe
        first, again = (pipe.generate(**REQUEST, **KEYWORDS, nodes=6, trace=True) for _ in range(2))
        assert first.trees == again.trees
        assert first.stats.num_draft_tokens > 0
        table, *ngram = pipe.drafter.members
        assert isinstance(table, Recycle)
        assert table.entries == 0
        assert [one._past.text for one in ngram] == [[]] * (name == "auto")
    assert loaded.pipeline("none").drafter is None
    assert [resolved("auto", loaded.pipeline(name)) for name in ("auto", "none", "recycle+ngram")] == [
        "recycle+ngram",
        "none",
        "recycle+ngram",
    ]
    with pytest.raises(UserError, match="drafter"):
        loaded.pipeline("nonsense")


def test_visitors_decode_together_and_get_the_answers_that_they_would_get_alone(models):
    """Streams in two threads, one of them dropped half-way; the slots are free afterwards."""
    pipe, batches = models.get("a").pipeline("recycle"), []
    policy, plan = pipe.policy, pipe.policy.plan
    policy.plan = lambda rows, remaining: batches.append(rows) or plan(rows, remaining)
    both = Barrier(2)

    def visit(prompt, pieces=None):
        work = stream_answer(models.get("a").pipeline("recycle"), "recycle", {"prompt": prompt}, KEYWORDS)
        answers = models.turns.run(work, lambda ahead: None)
        running = (answer for answer in answers if answer is not None)
        next(running)
        both.wait(60)
        *_, last = islice(running, pieces)
        answers.close()
        return last

    with ThreadPoolExecutor(2) as pool:
        visits = [pool.submit(visit, "abcabcabd"), pool.submit(visit, "one, two, one, two", 2)]
        whole, part = (one.result(timeout=300) for one in visits)
    alone = [Pipeline(*parts()).generate(prompt, **KEYWORDS) for prompt in ("abcabcabd", "one, two, one, two")]
    assert whole.token_ids == alone[0].token_ids
    assert whole.finish_reason == "length"
    assert 0 < len(part.token_ids) < 40
    assert part.token_ids == alone[1].token_ids[: len(part.token_ids)]
    assert max(batches) == 2
    assert pipe.engine.core.running == []


def test_a_race_runs_alone(models):
    """It waits for earlier requests, and later ones for it."""
    done = []

    def work(name):
        for step in range(2):
            done.append((name, step))
            yield step

    requests = {
        name: models.turns.run(work(name), lambda _: "waiting", alone=name == "race")
        for name in ("a", "b", "race", "c")
    }
    assert [next(requests[name]) for name in ("a", "b", "race", "c")] == [0, 0, "waiting", "waiting"]
    assert list(requests["a"]) == [1]
    assert next(requests["race"]) == "waiting"
    requests["b"].close()
    assert [next(requests["race"]), next(requests["c"])] == [0, "waiting"]
    assert list(requests["race"]) == [1]
    assert list(requests["c"]) == [0, 1]
    assert done == [("a", 0), ("b", 0), ("a", 1), ("race", 0), ("race", 1), ("c", 0), ("c", 1)]
    requests = [models.turns.run(iter("ab"), lambda _: "waiting", alone=alone) for alone in (False, True, False)]
    assert [next(request) for request in requests] == ["a", "waiting", "waiting"]
    requests[1].close()  # it has been cancelled
    assert list(requests[2]) == ["a", "b"]


def test_places_in_the_queue_and_a_full_queue(models, monkeypatch):
    monkeypatch.setattr(models_module, "RUNNING", 2)
    monkeypatch.setattr(models_module, "WAITING", 1)
    running, other, third, fourth = (models.turns.run(iter("ab"), lambda ahead: ahead) for _ in range(4))
    assert [next(running), next(other), next(third)] == ["a", "a", 2]
    with pytest.raises(UserError, match=r"busy with 3 requests: try again"):
        next(fourth)
    running.close()
    assert list(third) == ["a", "b"]


def test_race_tokens_equal_separate_runs():
    loaded = LoadedModel(*parts(), "bytes")
    methods = ["none", "ngram", "recycle@chain", "ngram@chain"]
    *_, end = race(loaded, methods, REQUEST, KEYWORDS)
    alone = Pipeline(*parts()).generate(**REQUEST, **KEYWORDS)
    assert end.finished
    assert end.equal
    assert end.difference is None
    assert [lane.drafter for lane in end.lanes] == methods
    for lane in end.lanes:
        assert lane.token_ids == alone.token_ids
        assert lane.text == alone.text
        assert lane.passes == lane.stats.num_spec_steps
        assert lane.pass_ends == sorted(lane.pass_ends)
    assert end.baseline is end.lanes[0]
    assert end.speedup(end.fastest) == pytest.approx(end.baseline.seconds / min(x.seconds for x in end.lanes[1:]))
    assert all(tree.parents == list(range(-1, len(tree.parents) - 1)) for lane in end.lanes[2:] for tree in lane.steps)
    with pytest.raises(UserError, match="got recycle\\+ngram twice"):
        next(race(loaded, ["recycle+ngram", "auto"], REQUEST, KEYWORDS))
