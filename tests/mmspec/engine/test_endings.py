"""Requests after others that have ended in every way, for every way of decoding: answered as if they were the first."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LogitsProcessor

from mmspec import plugins
from mmspec.cache.prefix_cache import PrefixCache
from mmspec.core.budget import Budget
from mmspec.engine.stopping import Stopper
from mmspec.ops import kernels
from mmspec.sampling.sampler import Sampler
from tests.decoding import SteppedEngine
from tests.drafters import assert_forgotten, assert_idle
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import VISION_CONFIGS
from tests.tiny.drafters import tiny_drafter, tiny_drafters
from tests.tiny.models import text_inputs, vision_inputs

NEW, CHUNK = 6, 8
NEED_IMAGES = ("vispec", "flash", "mtp")
CASES = [
    *[("llama", name, "varying") for name in ("plain", *tiny_drafters(), "recycle+ngram") if name not in NEED_IMAGES],
    *[("llama", name, "static") for name in ("plain", "recycle", "small", "mamba", "msd")],
    *[("llama", name, "cached") for name in ("plain", "ngram")],
    *[("bamba", name, "cached") for name in ("plain", "mamba")],
    *[("llava", name, "varying") for name in ("eagle3", "vispec", "flash")],
    ("qwen3_5", "mtp", "varying"),
]


@cache
def prompts(name):
    """Two, of several chunks."""
    made = [vision_inputs(name, images=1, seed=n) if name in VISION_CONFIGS else text_inputs(1, 20, n) for n in (1, 2)]
    return [prompt_of(inputs) for inputs in made]


@cache
def answers(name):
    """Tokens of each prompt's answer, decoded plainly by an engine of its own."""
    found = []
    for prompt in prompts(name):
        engine = SteppedEngine(plugins.target_class(shared_model(name).config)(shared_model(name)), None, budget(0))
        (row,) = engine.add(prompt, Sampler(), Stopper(40))
        engine.wait(lambda row=row: row.done)
        found.append(row.token_ids)
    return found


def budget(nodes):
    return lambda batch, asked: Budget(nodes, 4)


def step(engine):
    turns = iter((False, True))
    engine.wait(lambda: next(turns))


# ---------------------------------------------------------------------- endings


class FailError(Exception):
    """What the tests break by."""


def fail(*_, **__):
    raise FailError


class FailAt(LogitsProcessor):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        return fail() if input_ids.shape[1] == self.length else scores


def after_one_token(engine, prompt, patch):
    (row,) = engine.add(prompt, Sampler(), Stopper(1))
    engine.wait(lambda: row.done)
    assert row.finish_reason == "length"
    return [row]


def stops_inside_drafts(engine, prompt, patch):
    length, rows = prompt.input_ids.shape[1], []
    for new in range(2, 7):
        stopper = Stopper(30, criteria=[lambda ids, *_, end=length + new: torch.tensor([ids.shape[1] >= end])])
        rows += engine.add(prompt, Sampler(), stopper)
        engine.wait(lambda row=rows[-1]: row.done)
        assert (rows[-1].finish_reason, len(rows[-1].token_ids)) == ("stop", new)
    return rows


def failed_processor(engine, prompt, patch):
    rows = []
    for new in (0, 3):
        rows += engine.add(prompt, Sampler([FailAt(prompt.input_ids.shape[1] + new)]), Stopper(NEW))
        engine.wait(lambda row=rows[-1]: row.done)
        assert isinstance(rows[-1].error, FailError)
        assert len(rows[-1].token_ids) == new
    return rows


def failed_criterion(engine, prompt, patch):
    (row,) = engine.add(prompt, Sampler(), Stopper(NEW, criteria=[fail]))
    engine.wait(lambda: row.done)
    assert isinstance(row.error, FailError)
    return [row]


def cancelled_while_waiting(engine, prompt, patch):
    rows = engine.add(prompt, Sampler(), Stopper(NEW))
    engine.remove(rows)
    return rows


def cancelled_in_prefill(engine, prompt, patch):
    (first,) = engine.add(prompt, Sampler(), Stopper(40))
    step(engine)
    rows = engine.add(prompt, Sampler(), Stopper(NEW))
    step(engine)
    assert not rows[0].token_ids or engine.target.prefix_cache
    engine.remove(rows)
    step(engine)
    engine.remove([first])
    return [first, *rows]


def cancelled_after_prefill(engine, prompt, patch):
    rows = engine.add(prompt, Sampler(), Stopper(NEW))
    step(engine)
    assert len(rows[0].token_ids) == 1
    engine.remove(rows)
    return rows


def cancelled_in_decoding(engine, prompt, patch):
    rows = [row for _ in range(3) for row in engine.add(prompt, Sampler(), Stopper(30))]
    engine.wait(lambda: len(rows[1].token_ids) > 2)
    engine.remove([rows[1]])
    engine.wait(lambda: len(rows[2].token_ids) > 5)
    engine.remove([rows[0], rows[2]])
    return rows


def broken(engine, prompt, patch, owner, name, kind=FailError):
    """A step that fails with a sequence in decoding, one in prefill, and one that waits; not because of a drafter."""
    (first,) = engine.add(prompt, Sampler(), Stopper(40))
    step(engine)
    (second,) = engine.add(prompt, Sampler(), Stopper(NEW))
    if not engine.target.prefix_cache:
        step(engine)
        assert engine.core._prefilling is not None
    (third,) = engine.add(prompt, Sampler(), Stopper(NEW))

    def breaks(*_, **__):
        raise kind

    with patch.context() as broken_by:
        broken_by.setattr(owner, name, breaks)
        try:
            step(engine)
        except KeyboardInterrupt:
            assert kind is KeyboardInterrupt
    assert (first.error is None) == (owner is engine.drafter)
    assert second.done or owner is engine.drafter or engine.target.prefix_cache
    engine.wait(lambda: first.done and second.done and third.done)
    if third.error is None:
        assert len(third.token_ids) == NEW
    return [first, second, third]


def broken_verification(engine, prompt, patch):
    return broken(engine, prompt, patch, engine.target, "forward_tree")


def broken_commit(engine, prompt, patch):
    return broken(engine, prompt, patch, engine.target, "commit")


def broken_drafter(engine, prompt, patch):
    if engine.drafter is None:
        return []
    rows = []
    for method in ("propose", "observe"):
        first, *others = broken(engine, prompt, patch, engine.drafter, method)
        assert first.token_ids[:NEW] == others[0].token_ids == others[1].token_ids
        assert "FailError" in first.stats.drafter_error
        rows += [first, *others]
    return rows


def interrupted(engine, prompt, patch):
    return broken(engine, prompt, patch, engine.target, "forward_tree", KeyboardInterrupt)


def broken_prefill(engine, prompt, patch):
    with patch.context() as broken_by:
        broken_by.setattr(engine.target, "prefill_chunks", fail)
        (row,) = engine.add(prompt, Sampler(), Stopper(NEW))
        engine.wait(lambda: row.done)
    assert isinstance(row.error, FailError)
    return [row]


ENDINGS = [
    after_one_token,
    stops_inside_drafts,
    failed_processor,
    failed_criterion,
    cancelled_while_waiting,
    cancelled_in_prefill,
    cancelled_after_prefill,
    cancelled_in_decoding,
    broken_verification,
    broken_commit,
    broken_drafter,
    interrupted,
    broken_prefill,
]


@pytest.mark.drafter_fails
@pytest.mark.parametrize(("name", "drafter", "kind"), CASES)
def test_the_next_requests_are_answered(name, drafter, kind, monkeypatch):
    if kind == "static":
        monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    model = shared_model(name)
    target = plugins.target_class(model.config)(model)
    if kind == "cached":
        target.prefix_cache = PrefixCache(1 << 24)
    engine = SteppedEngine(target, tiny_drafter(drafter, model), budget(9), max_num_seqs=4, chunk=CHUNK)
    expected, ended = [answer[:NEW] for answer in answers(name)], []
    for ending in ENDINGS:
        ended += ending(engine, prompts(name)[0], monkeypatch)
        assert_idle(engine)
        rows = [row for prompt in prompts(name) for row in engine.add(prompt, Sampler(), Stopper(NEW))]
        engine.wait(lambda rows=rows: all(row.done for row in rows))
        assert (ending, [row.error for row in rows]) == (ending, [None, None])
        assert (ending, [row.token_ids for row in rows]) == (ending, expected)
        assert_idle(engine)
        ended += rows
    assert all(sequence.done for sequence in ended)
    assert_forgotten(ended)
