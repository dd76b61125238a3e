"""Many requests on one pipeline: each answer is the one it would be alone, or it is refused; nothing waits for ever."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

import mmspec
from mmspec import Pipeline, UserError, turns
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.union import Union
from mmspec.trace import Traced
from mmspec.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

PROMPTS = ["a", "The second one, the second one", "xyz" * 9, "one, two, one, two"]
KEYWORDS = {"max_new_tokens": 12, "nodes": 6}
UNFINISHED = "^a pipeline serves one request at a time: a stream is not finished, finish or close it first$"


def target():
    return TransformersTarget(byte_model(), byte_tokenizer())


def pipeline(drafter=None):
    return Pipeline(target(), drafter)


@pytest.fixture(scope="module")
def alone():
    return {prompt: pipeline().generate(prompt, **KEYWORDS).token_ids for prompt in PROMPTS}


def begun(pipe, prompt=PROMPTS[1]):
    """A stream that has yielded and is not finished."""
    stream = pipe.stream(prompt, **KEYWORDS)
    first = next(stream)
    assert first.finish_reason is None
    return stream, first


def streamed(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def in_thread(function, *arguments):
    """The result of a call made in another thread; a deadlock fails the test."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result(timeout=300)


def shared_pipelines(kind):
    drafter = Recycle()
    if kind == "pipeline":
        return [pipeline(drafter)] * 3
    if kind == "target":
        one = target()
        return [Pipeline(one, drafter), Pipeline(one, Ngram()), Pipeline(one)]
    if kind == "drafter":
        return [pipeline(drafter), pipeline(Traced(drafter)), pipeline(drafter)]
    return [pipeline(drafter), pipeline(Ngram()), pipeline()]  # one model, everything else apart


@pytest.mark.parametrize("kind", ["pipeline", "target", "drafter", "model"])
def test_threads_get_the_answers_that_they_would_get_alone(kind, alone):
    pipes = shared_pipelines(kind)

    def ask(pipe, prompt, number):
        if number % 2:
            return streamed(pipe.stream(prompt, **KEYWORDS))
        return pipe.generate(prompt, **KEYWORDS).token_ids

    jobs = list(product(pipes, PROMPTS, range(2)))
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, *job) for job in jobs]
        for (_, prompt, _), answer in zip(jobs, answers, strict=True):
            assert answer.result(timeout=300) == alone[prompt]


def test_threads_of_the_hook(alone):
    model, drafter = byte_model(), Recycle()
    ids = {prompt: torch.tensor([byte_tokenizer()(prompt)["input_ids"]]) for prompt in PROMPTS}

    def ask(prompt, name):
        options = {"max_new_tokens": 12, "do_sample": False, "nodes": 6, "drafter": drafter if name == "own" else name}
        return mmspec.generate(model, ids[prompt], **options)[0, ids[prompt].shape[1] :].tolist()

    jobs = list(product(PROMPTS, ["own", "ngram", None]))
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, *job) for job in jobs]
        for (prompt, _), answer in zip(jobs, answers, strict=True):
            assert answer.result(timeout=300) == alone[prompt]


@pytest.mark.parametrize("kind", ["pipeline", "target", "drafter"])
def test_a_request_beside_an_unfinished_stream_is_refused(kind, alone):
    first, second, _ = shared_pipelines(kind)
    stream, piece = begun(first)
    with pytest.raises(UserError, match=UNFINISHED):
        second.generate(PROMPTS[0], **KEYWORDS)
    with pytest.raises(UserError, match=UNFINISHED):
        next(second.stream(PROMPTS[0], **KEYWORDS))
    with pytest.raises(UserError, match=UNFINISHED):
        mmspec.generate(first.model, torch.tensor([[5]]), drafter=second, do_sample=False, max_new_tokens=3)
    assert streamed([piece, *stream]) == alone[PROMPTS[1]]  # it did not notice
    assert second.generate(PROMPTS[0], **KEYWORDS).token_ids == alone[PROMPTS[0]]


def test_zipped_streams_of_one_pipeline_are_refused():
    pipe = pipeline()
    with pytest.raises(UserError, match=UNFINISHED):
        list(zip(pipe.stream(PROMPTS[0], **KEYWORDS), pipe.stream(PROMPTS[1], **KEYWORDS), strict=False))
    gc.collect()
    assert pipe.generate(PROMPTS[0], **KEYWORDS)


def test_streams_of_pipelines_with_targets_of_their_own_may_be_mixed(alone):
    one, other = pipeline(Ngram()), pipeline()  # of one model
    pairs = list(zip(one.stream(PROMPTS[1], **KEYWORDS), other.stream(PROMPTS[1], **KEYWORDS), strict=False))
    assert len(pairs) > 2
    (first, head), (second, _) = begun(one), begun(other, PROMPTS[2])
    list(second)
    assert streamed([head, *first]) == alone[PROMPTS[1]]


@pytest.mark.parametrize("end", ["drop", "close", "close elsewhere", "error", "error inside", "exhaust"])
def test_what_ends_a_stream_frees_the_pipeline(end, alone):
    pipe = pipeline(Recycle())
    if end == "error inside":

        def fails(ids, scores):
            if ids.shape[1] > 3:
                raise RuntimeError("a processor's own")
            return scores

        with pytest.raises(RuntimeError, match="own"):
            list(pipe.stream(PROMPTS[0], **KEYWORDS, logits_processor=[fails]))
        with pytest.raises(RuntimeError, match="own"):
            pipe.generate(PROMPTS[0], **KEYWORDS, logits_processor=[fails])
    elif end == "error":
        stream, _ = begun(pipe)
        with pytest.raises(RuntimeError, match="consumer"):
            stream.throw(RuntimeError("the consumer's own"))
    else:
        stream, _ = begun(pipe)
        if end == "close":
            stream.close()
        elif end == "close elsewhere":
            in_thread(stream.close)
        elif end == "exhaust":
            assert list(stream)[-1].finish_reason is not None
        del stream
    assert pipe.generate(PROMPTS[0], **KEYWORDS).token_ids == alone[PROMPTS[0]]
    assert not turns._HOLDERS


def test_a_stream_that_was_not_begun_holds_nothing(alone):
    pipe = pipeline()
    stream = pipe.stream(PROMPTS[1], **KEYWORDS)
    assert pipe.generate(PROMPTS[0], **KEYWORDS).token_ids == alone[PROMPTS[0]]
    assert streamed(stream) == alone[PROMPTS[1]]


def test_the_last_piece_comes_when_the_pipeline_is_free():
    pipe = pipeline()
    for piece in pipe.stream(PROMPTS[1], **KEYWORDS):
        if piece.finish_reason is not None:
            assert pipe.generate(PROMPTS[0], **KEYWORDS)


def test_a_stream_moves_between_threads(alone):
    pipe = pipeline(Recycle())
    stream, first = begun(pipe)
    second = in_thread(next, stream)
    rest = threading.Thread(target=lambda: found.extend(stream))
    found = []
    rest.start()
    answer = pipe.generate(PROMPTS[0], **KEYWORDS)  # waits for the other thread, which has the stream now
    rest.join()
    assert answer.token_ids == alone[PROMPTS[0]]
    assert streamed([first, second, *found]) == alone[PROMPTS[1]]


def test_a_stream_of_a_thread_that_has_ended_is_not_waited_for():
    pipe = pipeline()
    stream, _ = in_thread(begun, pipe)
    with pytest.raises(UserError, match=UNFINISHED):
        pipe.generate(PROMPTS[0], **KEYWORDS)
    stream.close()
    assert pipe.generate(PROMPTS[0], **KEYWORDS)


def test_who_waits_for_a_stream_that_nobody_resumes_is_refused_in_the_end(monkeypatch, alone):
    """As where ``asyncio.to_thread`` is awaited between two pieces: the stream's thread waits for the request."""
    monkeypatch.setattr(turns, "PATIENCE", 0.2)
    pipe = pipeline()

    async def ask():
        found = []
        for piece in pipe.stream(PROMPTS[1], **KEYWORDS):
            if not found:
                with pytest.raises(UserError, match=UNFINISHED):
                    await asyncio.to_thread(pipe.generate, PROMPTS[0], **KEYWORDS)
            found.append(piece)
        return streamed(found)

    assert asyncio.run(ask()) == alone[PROMPTS[1]]


def test_tasks_that_wait_in_threads(alone):
    pipe = pipeline(Recycle())

    async def ask():
        return await asyncio.gather(*(asyncio.to_thread(pipe.generate, prompt, **KEYWORDS) for prompt in PROMPTS))

    for prompt, answer in zip(PROMPTS, asyncio.run(ask()), strict=True):
        assert answer.token_ids == alone[prompt]


@pytest.mark.parametrize("from_where", ["logits_processor", "stopping_criteria"])
def test_a_request_from_within_a_request_is_refused(from_where):
    pipe = pipeline()

    def asks(*arguments, **_):
        return pipe.generate(PROMPTS[0], **KEYWORDS)

    with pytest.raises(UserError, match="one request at a time: this one was made while another is decoding"):
        pipe.generate(PROMPTS[1], **KEYWORDS, **{from_where: [asks]})
    assert pipe.generate(PROMPTS[0], **KEYWORDS)


def test_a_drafter_follows_the_pipeline_that_uses_it():
    """A second pipeline attaches the drafter to its own target; the first one's requests must not draft for that."""

    class Loyal(Ngram):
        def attach(self, target):
            self.target = target

        def propose(self, token, budget):
            assert self.target is using.target
            return super().propose(token, budget)

    drafter = Loyal()
    pipes = [pipeline(drafter), pipeline(drafter)]
    for using in (*pipes, *pipes):
        using.generate(PROMPTS[1], **KEYWORDS)


def test_members_of_a_union_are_held_with_it(alone):
    shared = Recycle()
    first, second = pipeline(Union([shared, Ngram()])), pipeline(shared)
    stream, _ = begun(first)
    with pytest.raises(UserError, match=UNFINISHED):
        second.generate(PROMPTS[0], **KEYWORDS)
    stream.close()
    assert second.generate(PROMPTS[0], **KEYWORDS).token_ids == alone[PROMPTS[0]]
