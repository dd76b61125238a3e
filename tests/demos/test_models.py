"""Tests of the model cache, of sequential requests and of races."""

import gc
import weakref
from itertools import zip_longest

import pytest

from demos import models as models_module
from demos.models import LoadedModel, ModelCache
from demos.streaming import StreamedAnswer, race, stream_answer
from mmspec import Pipeline, UserError
from mmspec.drafters.recycle import Recycle
from mmspec.speculation.budget import CostTable
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

COST = CostTable((1, 64), (0.01, 0.012))
REQUEST = {"prompt": "abcabcabd"}
KEYWORDS = {"max_new_tokens": 40, "temperature": 0.0, "seed": 0}


def parts():
    """A target and its processor."""
    made = TransformersTarget(byte_model())
    made.cost = COST
    return made, Processor(byte_tokenizer())


@pytest.fixture
def models(monkeypatch):
    opened = []

    def open_pipeline(notes, model, drafter, device, dtype):
        if model == "nobody/nothing":
            raise UserError("cannot load model 'nobody/nothing'")
        opened.append(model)
        return Pipeline(*parts(), None, model)

    monkeypatch.setattr(models_module, "open_pipeline", open_pipeline)
    monkeypatch.setattr(models_module, "cost_table", lambda target: COST)
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


def test_requests_do_not_share_learned_drafts():
    loaded = LoadedModel(*parts(), "bytes")
    one, other = loaded.pipeline("recycle"), loaded.pipeline("recycle")
    one.generate(**REQUEST, **KEYWORDS)
    assert isinstance(one.drafter.drafter, Recycle)
    assert one.drafter.drafter.entries > 0 == other.drafter.drafter.entries
    assert loaded.pipeline("recycle").drafter.drafter.entries == 0
    latest = loaded.pipeline("recycle")
    latest.generate(**REQUEST, **KEYWORDS)
    assert loaded.pipeline("recycle").budget is latest.budget is not None
    assert loaded.pipeline("none").drafter is None
    assert (loaded.drafter_label("auto"), loaded.drafter_label("none")) == ("recycle", "none")
    with pytest.raises(UserError, match="drafter"):
        loaded.pipeline("nonsense")


def test_new_request_cancels_an_unfinished_one(models):
    done = []

    def work(name):
        for step in range(3):
            done.append((name, step))
            yield step

    cancelled = models.one_at_a_time(work("cancelled"))
    assert next(cancelled) == 0
    assert list(models.one_at_a_time(work("next"))) == [0, 1, 2]
    assert list(cancelled) == []
    assert ("cancelled", 1) not in done


def test_closing_a_request_closes_its_generator(models):
    ended = []

    def work():
        try:
            yield from range(100)
        finally:
            ended.append(True)

    request = models.one_at_a_time(work())
    assert next(request) == 0
    request.close()
    assert ended == [True]


def test_race_tokens_equal_separate_runs():
    loaded = LoadedModel(*parts(), "bytes")
    reports = list(race(loaded, "ngram", REQUEST, KEYWORDS))
    end = reports[-1]
    alone = Pipeline(*parts()).generate(**REQUEST, **KEYWORDS)
    assert end.finished
    assert end.equal
    assert end.difference is None
    assert end.plain.token_ids == end.speculative.token_ids == alone.token_ids
    assert end.plain.text == alone.text
    assert end.decode_ratio == pytest.approx(
        end.speculative.stats.tokens_per_second / end.plain.stats.tokens_per_second
    )
    assert end.end_to_end_ratio == pytest.approx(end.plain.seconds / end.speculative.seconds)
    assert len(end.speculative.steps) == end.speculative.stats.num_spec_steps


def test_interleaved_races_do_not_interfere():
    loaded = [LoadedModel(*parts(), "one"), LoadedModel(*parts(), "other")]
    prompts = ["abcabcabd", "one, two, one, two"]
    races = [race(one, "recycle", {"prompt": p}, KEYWORDS) for one, p in zip(loaded, prompts, strict=True)]
    ends = [[state for state in states if state][-1] for states in zip(*zip_longest(*races), strict=True)]
    for prompt, end in zip(prompts, ends, strict=True):
        assert end.equal
        assert end.plain.token_ids == Pipeline(*parts()).generate(prompt, **KEYWORDS).token_ids


def test_request_after_a_cancelled_one(models):
    loaded = models.get("a")
    cancelled = models.one_at_a_time(stream_answer(loaded.pipeline("recycle"), "recycle", REQUEST, KEYWORDS))
    next(cancelled)
    *_, run = models.one_at_a_time(stream_answer(loaded.pipeline("recycle"), "recycle", REQUEST, KEYWORDS))
    assert run.token_ids == Pipeline(*parts()).generate(**REQUEST, **KEYWORDS).token_ids
    assert list(cancelled) == []


def test_race_steps_the_method_that_used_less_time(monkeypatch):
    steps = []

    def stream_answer(pipe, drafter, request, keywords):
        run = StreamedAnswer(pipe.name, drafter)
        cost = 1.0 if drafter == "none" else 2.5
        while run.seconds < 10:
            run.seconds += cost
            steps.append(drafter)
            yield run

    monkeypatch.setattr("demos.streaming.stream_answer", stream_answer)
    monkeypatch.setattr("demos.streaming._compare", lambda *_: None)
    monkeypatch.setattr(Pipeline, "generate", lambda *_, **__: None)
    list(race(LoadedModel(*parts(), "bytes"), "ngram", REQUEST, KEYWORDS))
    clocks = {"none": 0.0, "ngram": 0.0}
    for name in steps:
        if max(clocks.values()) < 10:  # afterwards the other one runs alone
            assert clocks[name] == min(clocks.values())
        clocks[name] += 1.0 if name == "none" else 2.5
    assert clocks == {"none": 10.0, "ngram": 10.0}
