"""Processes that fork from one whose engine has decoded, decodes, or is in a step that does not end."""

import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmspec import UserError
from mmspec.drafters.ngram import Ngram
from mmspec.engine import engine
from tests.mmspec.engine.test_threads import KEYWORDS, PROMPTS, pipeline

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
GRAMMAR = {"regex": "[ab]{3,9}", "max_new_tokens": 12}


def in_child(check):
    """Run a check in a forked process; the test fails where it fails, or has not ended after a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with several threads
        process = multiprocessing.get_context("fork").Process(target=check)
        process.start()
    process.join(60)
    hangs = process.is_alive()
    process.kill()
    process.join()
    assert not hangs
    assert process.exitcode == 0


@pytest.fixture
def pipe():
    pipe = pipeline(Ngram(), prefix_cache=1 << 20)
    yield pipe
    pipe.engine.drain()


@pytest.mark.parametrize("grammar", [False, True])
def test_a_child_decodes_after_its_parent(pipe, grammar):
    keywords = GRAMMAR if grammar else KEYWORDS
    expected = [pipe.generate(prompt, **keywords).token_ids for prompt in PROMPTS]

    def check():
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda prompt: pipe.generate(prompt, **keywords).token_ids, PROMPTS)
            assert list(answers) == expected

    in_child(check)
    assert [pipe.generate(prompt, **keywords).token_ids for prompt in PROMPTS] == expected


def test_a_child_has_none_of_its_parents_waiting_threads(pipe):
    def check():
        engine = pipe.engine
        assert (engine._pauses, engine._drains, engine._worker, engine._last_worker) == (0, 0, None, None)

    pipe.generate(PROMPTS[0], **KEYWORDS)
    with pipe.engine.drained(), pipe.engine.paused():
        in_child(check)


def test_a_child_decodes_while_its_parent_does(pipe):
    """Again and again, at any place of a step; the parent loses nothing, and its streams are not the child's."""
    expected = {prompt: pipe.generate(prompt, **KEYWORDS).token_ids for prompt in PROMPTS}
    ended = threading.Event()

    def decode():
        while not ended.is_set():
            assert pipe.generate(PROMPTS[1], **KEYWORDS).token_ids == expected[PROMPTS[1]]

    def check():
        with pytest.raises(UserError, match=r"^this answer began before the process forked: expected its parent"):
            list(stream)
        assert {prompt: pipe.generate(prompt, **KEYWORDS).token_ids for prompt in PROMPTS} == expected

    whole = KEYWORDS | {"max_new_tokens": 100}
    said, slowly = pipe.generate(PROMPTS[0], **whole).token_ids, lambda *_: time.sleep(0.01) or False
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(decode)
        try:
            for _ in range(6):
                stream = pipe.stream(PROMPTS[0], **whole, stopping_criteria=[slowly])
                tokens = list(next(stream).token_ids)
                in_child(check)
                tokens += [token for piece in stream for token in piece.token_ids]
                assert tokens == said
        finally:
            ended.set()
        decoding.result(60)


def test_a_child_of_a_step_that_does_not_end_refuses_requests(pipe, monkeypatch):
    monkeypatch.setattr(engine, "_FORK_SECONDS", 0.2)
    held, entered = threading.Event(), threading.Event()

    def hold(ids, scores):
        entered.set()
        assert held.wait(120)
        return scores

    def check():
        with pytest.raises(UserError, match=r"^the process forked during a step: expected a model that is loaded"):
            pipe.generate(PROMPTS[0], **KEYWORDS)
        pipe.engine.close()

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pipe.generate, PROMPTS[0], logits_processor=[hold], **KEYWORDS)
        assert entered.wait(60)
        try:
            in_child(check)
        finally:
            held.set()
        assert answer.result(60).token_ids == pipe.generate(PROMPTS[0], **KEYWORDS).token_ids
