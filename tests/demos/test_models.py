"""Models are read once, given up when others are asked for, and serve one request at a time."""

import gc
import weakref
from itertools import zip_longest

import pytest

from demos import models as home
from demos.models import Loaded, Models
from demos.runs import Run, follow, race
from mmspec import Pipeline, UserError
from mmspec.budget import CostTable
from mmspec.drafters.recycle import Recycle
from mmspec.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

COST = CostTable((1, 64), (0.01, 0.012))
ASKED = {"prompt": "abcabcabd"}
KEYWORDS = {"max_new_tokens": 40, "temperature": 0.0, "seed": 0}


def target():
    made = TransformersTarget(byte_model(), byte_tokenizer())
    made.cost = COST
    return made


@pytest.fixture
def models(monkeypatch):
    opened = []

    def open_pipeline(notes, model, drafter, device, dtype):
        if model == "nobody/nothing":
            raise UserError("cannot load model 'nobody/nothing'")
        opened.append(model)
        return Pipeline(target(), None, model)

    monkeypatch.setattr(home, "open_pipeline", open_pipeline)
    monkeypatch.setattr(home, "cost_table", lambda target: COST)
    made = Models(keep=2)
    made.opened = opened
    return made


def test_the_least_recently_used_is_given_up(models):
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


def test_requests_share_no_drafts():
    loaded = Loaded(target(), "bytes")
    one, other = loaded.pipeline("recycle"), loaded.pipeline("recycle")
    one.generate(**ASKED, **KEYWORDS)
    assert isinstance(one.drafter.drafter, Recycle)
    assert one.drafter.drafter.entries > 0 == other.drafter.drafter.entries
    assert loaded.pipeline("recycle").drafter.drafter.entries == 0
    assert one.budgets is other.budgets
    assert loaded.pipeline("none").drafter is None
    assert (loaded.label("auto"), loaded.label("none")) == ("recycle", "none")
    with pytest.raises(UserError, match="drafter"):
        loaded.pipeline("nonsense")


def test_a_request_that_another_overtook_ends(models):
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


def test_closing_a_request_stops_its_work(models):
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


def test_a_race_gives_what_both_would_have_said_alone():
    loaded = Loaded(target(), "bytes")
    reports = list(race(loaded, "ngram", ASKED, KEYWORDS))
    end = reports[-1]
    alone = Pipeline(target(), None).generate(**ASKED, **KEYWORDS)
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


def test_races_on_targets_of_one_model_do_not_mix():
    loaded = [Loaded(target(), "one"), Loaded(target(), "other")]
    prompts = ["abcabcabd", "one, two, one, two"]
    races = [race(one, "recycle", {"prompt": p}, KEYWORDS) for one, p in zip(loaded, prompts, strict=True)]
    ends = [[state for state in states if state][-1] for states in zip(*zip_longest(*races), strict=True)]
    for prompt, end in zip(prompts, ends, strict=True):
        assert end.equal
        assert end.plain.token_ids == Pipeline(target()).generate(prompt, **KEYWORDS).token_ids


def test_a_cancelled_request_frees_the_model_for_the_next(models):
    loaded = models.get("a")
    cancelled = models.one_at_a_time(follow(loaded.pipeline("recycle"), "recycle", ASKED, KEYWORDS))
    next(cancelled)
    *_, run = models.one_at_a_time(follow(loaded.pipeline("recycle"), "recycle", ASKED, KEYWORDS))
    assert run.token_ids == Pipeline(target()).generate(**ASKED, **KEYWORDS).token_ids
    assert list(cancelled) == []


def test_whoever_used_less_time_goes_next(monkeypatch):
    moves = []

    def follow(pipe, drafter, request, keywords):
        run = Run(pipe.name, drafter)
        cost = 1.0 if drafter == "none" else 2.5
        while run.seconds < 10:
            run.seconds += cost
            moves.append(drafter)
            yield run

    monkeypatch.setattr("demos.runs.follow", follow)
    monkeypatch.setattr("demos.runs._compare", lambda *_: None)
    monkeypatch.setattr(Pipeline, "generate", lambda *_, **__: None)
    list(race(Loaded(target(), "bytes"), "ngram", ASKED, KEYWORDS))
    clocks = {"none": 0.0, "ngram": 0.0}
    for name in moves:
        if max(clocks.values()) < 10:  # afterwards one runs alone
            assert clocks[name] == min(clocks.values())
        clocks[name] += 1.0 if name == "none" else 2.5
    assert clocks == {"none": 10.0, "ngram": 10.0}
