"""Requests after others that have ended in every way, for every way of decoding: answered as if they were the first."""

import pytest
import torch
from transformers import LogitsProcessor

from mmspec.cache.prefix_cache import PrefixCache
from mmspec.core.plan import StepPlan
from mmspec.engine.stopping import Stopper
from mmspec.ops import kernels
from mmspec.sampling.sampler import Sampler
from tests import matrix
from tests.decoding import SteppedEngine, assert_forgotten, assert_idle

NEW = 6
DEFAULT = ("plain", "recycle", "suffix", "eagle3", "dflash", "early-exit", "msd", "recycle+ngram")
CASES = [
    *[
        pytest.param("llava" if name in ("vispec", "flash") else "llama", name, "varying", marks=marks)
        for name in matrix.DRAFTERS
        for marks in [() if name in DEFAULT else pytest.mark.long]
    ],
    *[("llama", name, "static") for name in ("plain", "recycle", "small", "mamba", "msd")],
    *[("llama", name, "cached") for name in ("plain", "ngram")],
    *[("bamba", name, "cached") for name in ("plain", "mamba")],
]


def requests(name):
    """Two prompts of several chunks, and the first tokens of their answers."""
    some = [matrix.asked(name, "greedy", number) for number in (3, 4, 5)]
    return [(one.prompt, one.tokens[:NEW]) for one in some if len(one.tokens) >= NEW][:2]


def step(engine):
    turns = iter((False, True))
    engine.wait(lambda: next(turns))


class FailError(Exception):
    """Error that the tests raise."""


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
    assert not rows[0].token_ids or engine.prefixes
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


def broken(engine, prompt, patch, name, kind=FailError):
    """A step that fails with a sequence in decoding, one in prefill, and one that waits."""
    (first,) = engine.add(prompt, Sampler(), Stopper(40))
    step(engine)
    told = []
    (second,) = engine.add(prompt, Sampler(), Stopper(NEW), sink=lambda delta: told.append(second.error))
    if not engine.prefixes:
        step(engine)
        assert engine.core._prefilling is not None
    (third,) = engine.add(prompt, Sampler(), Stopper(NEW))

    def breaks(*_, **__):
        raise kind

    with patch.context() as broken_by:
        broken_by.setattr(engine.target, name, breaks)
        try:
            step(engine)
        except KeyboardInterrupt:
            assert kind is KeyboardInterrupt
    assert first.error is not None
    assert engine.prefixes or (second.done and told == [second.error])
    engine.wait(lambda: first.done and second.done and third.done)
    if third.error is None:
        assert len(third.token_ids) == NEW
    return [first, second, third]


def broken_prefill(engine, prompt, patch):
    with patch.context() as broken_by:
        broken_by.setattr(engine.target, "prefill", fail)
        broken_by.setattr(engine.target, "restore", fail)
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
    lambda *given: broken(*given, "verify"),
    lambda *given: broken(*given, "commit"),
    lambda *given: broken(*given, "verify", KeyboardInterrupt),
    broken_prefill,
]


@pytest.mark.parametrize(("name", "drafter", "kind"), CASES)
def test_the_next_requests_are_answered(name, drafter, kind, monkeypatch):
    if kind == "static":
        monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    target = matrix.new_target(name)
    engine = SteppedEngine(target, matrix.drafter_of(drafter, target.model), StepPlan(9, 4), max_num_seqs=4, chunk=8)
    if kind == "cached":
        engine.use_prefixes(PrefixCache(1 << 24))
    (prompts, expected), ended = zip(*requests(name), strict=True), []
    for ending in ENDINGS:
        ended += ending(engine, prompts[0], monkeypatch)
        assert_idle(engine)
        rows = [row for prompt in prompts for row in engine.add(prompt, Sampler(), Stopper(NEW))]
        engine.wait(lambda rows=rows: all(row.done for row in rows))
        assert (ending, [row.error for row in rows]) == (ending, [None, None])
        assert (ending, [row.token_ids for row in rows]) == (ending, [*expected])
        assert_idle(engine)
        ended += rows
    assert all(sequence.done for sequence in ended)
    assert_forgotten(ended)


@pytest.mark.parametrize("limit", [1, NEW])
def test_clients_hear_of_first_tokens_and_ends_of_prompts_of_several_chunks(limit, monkeypatch):
    target = matrix.new_target("llama")
    engine = SteppedEngine(target, None, StepPlan(0), max_num_seqs=4, chunk=8)
    (prompt, expected), (other, _) = requests("llama")
    assert other.input_ids.shape[1] > 16
    (running,) = engine.add(prompt, Sampler(), Stopper(40))
    step(engine)
    told, passes = [], []
    monkeypatch.setattr(engine.threads, "end_step", passes.append)
    (late,) = engine.add(other, Sampler(), Stopper(limit), sink=lambda delta: told.append(len(late.token_ids)))
    while not late.token_ids:
        assert not running.done
        assert not any(told)
        step(engine)
    assert told[-1] in ((1,) if limit == 1 else (1, 2))
    assert late.done == (limit == 1)
    engine.wait(lambda: running.done)
    assert running.token_ids[:NEW] == expected
    assert (passes, 2 in passes) == (sorted(passes, key=[0, 2, 1].index), limit > 1)  # tokens if without a prefill
