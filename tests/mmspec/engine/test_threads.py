"""Threads, tasks and unfinished streams on one pipeline: each answer is the one that the request has alone.

Pipelines that share a target or a drafter wait for each other's requests, never for the readers of these.
"""

import asyncio
import gc
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

import mmspec
from mmspec import Pipeline, SamplingParams, UserError
from mmspec.cache.prefix_cache import PrefixCache
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.union import Union
from mmspec.engine import policy
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

PROMPTS = ["a", "The second one, the second one", "xyz" * 9, "one, two, one, two"]
KEYWORDS = {"max_new_tokens": 12, "nodes": 6}


PROCESSOR = Processor(byte_tokenizer())


def pipeline(drafter=None, target=None, **keywords):
    return Pipeline(target or TransformersTarget(byte_model()), PROCESSOR, drafter, **keywords)


@pytest.fixture(scope="module")
def alone():
    return {prompt: pipeline().generate(prompt, **KEYWORDS).token_ids for prompt in PROMPTS}


def begun(pipe, prompt=PROMPTS[1], **keywords):
    """A stream that has yielded its first token and is not finished: the engine goes on when this returns."""
    engine, read, steps = pipe.engine, threading.Event(), itertools.count()

    def step():
        if next(steps):
            assert read.wait(120)
        type(engine.core).step(engine.core)

    engine.drain()
    engine.core.step = step
    try:
        stream = pipe.stream(prompt, **KEYWORDS | keywords)
        first = next(stream)
    finally:
        del engine.core.step
        read.set()
    assert first.finish_reason is None
    return stream, first


def free(pipe):
    pipe.engine.drain()
    return pipe.target.runner.rows == 0 and id(pipe.drafter) not in policy._OWNERS


def streamed(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def in_thread(function, *arguments, **keywords):
    """The result of a call made in another thread; a deadlock fails the test."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments, **keywords).result(timeout=300)


def shared_pipelines(kind, **keywords):
    drafter = Recycle()
    if kind == "pipeline":
        return [pipeline(drafter, **keywords)] * 3
    if kind == "drafter":
        return [pipeline(made, **keywords) for made in (drafter, Union([drafter, Ngram()]), drafter)]
    one = TransformersTarget(byte_model()) if kind == "target" else None  # otherwise only the model is shared
    return [pipeline(made, one, **keywords) for made in (drafter, Ngram(), None)]


@cache
def mixed_requests():
    """Greedy and seeded sampling, and stop strings, with the answer that each has alone."""
    rng, plain, found = random.Random(1), pipeline(), []
    for _ in range(12):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=rng.randrange(3),
            max_new_tokens=rng.randrange(1, 20),
            stop=rng.choice([None, "e"]),
        )
        prompt = rng.choice(PROMPTS)
        answer = plain.generate(prompt, params=params)
        found.append((prompt, params, (answer.text, answer.token_ids)))
    return found


@pytest.mark.parametrize("kind", ["pipeline", "target", "drafter", "model"])
def test_threads_get_the_answers_that_they_would_get_alone(kind):
    pipes = shared_pipelines(kind, max_num_seqs=5)

    def ask(number):
        pipe, found = pipes[number % len(pipes)], []
        for place in random.Random(number).sample(range(12), 12):
            prompt, params, expected = mixed_requests()[place]
            if place % 3 == 0:
                pieces = list(pipe.stream(prompt, params=params))
                found.append((("".join(piece.text for piece in pieces), streamed(pieces)), expected))
            else:
                answers = pipe.generate_batch([{"prompt": prompt, "params": params}] * (place % 3))
                found += [((answer.text, answer.token_ids), expected) for answer in answers]
        return found

    mixed_requests()
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, number) for number in range(6)]
        for answer in answers:
            assert all(found == expected for found, expected in answer.result(timeout=300))
    assert not any(pipe.engine.core.running for pipe in pipes)


@pytest.mark.parametrize("kind", ["pipeline", "target", "drafter"])
def test_another_pipeline_answers_beside_a_stream_that_nobody_reads(kind, alone):
    first, second, _ = shared_pipelines(kind)
    stream, piece = begun(first)
    assert second.generate(PROMPTS[0], **KEYWORDS).token_ids == alone[PROMPTS[0]]
    assert streamed(second.stream(PROMPTS[2], **KEYWORDS)) == alone[PROMPTS[2]]
    ids = torch.tensor([byte_tokenizer()(PROMPTS[3])["input_ids"]])
    said = mmspec.generate(second.model, ids, drafter=second, do_sample=False, **KEYWORDS)
    assert said[0, ids.shape[1] :].tolist() == alone[PROMPTS[3]]
    assert streamed([piece, *stream]) == alone[PROMPTS[1]]  # it did not notice


@pytest.mark.parametrize("part", ["target.verify", "threads.end_step"])
def test_a_failed_pass_ends_its_requests_and_no_later_ones(part, monkeypatch, alone):
    pipe = pipeline(Recycle())
    stream, _ = begun(pipe)
    owner, name = part.split(".")

    def fails(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(pipe.engine, owner), name, fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            pipe.generate(PROMPTS[0], **KEYWORDS)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(stream)
    assert pipe.generate(PROMPTS[0], **KEYWORDS).token_ids == alone[PROMPTS[0]]


@pytest.mark.parametrize("end", ["drop", "close", "close elsewhere", "error", "exhaust"])
def test_what_ends_a_stream_frees_the_pipeline(end, alone):
    pipe = pipeline(Recycle())
    stream, _ = begun(pipe)
    if end == "error":
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
    elif end == "close":
        stream.close()
    elif end == "close elsewhere":
        in_thread(stream.close)
    elif end == "exhaust":
        assert list(stream)[-1].finish_reason is not None
    del stream
    assert pipe.generate(PROMPTS[0], **KEYWORDS).token_ids == alone[PROMPTS[0]]
    assert free(pipe)


def test_a_prefix_cache_is_set_after_the_last_answer(alone):
    pipe = pipeline(Recycle())
    stream, piece = begun(pipe)
    pipe.engine.use_prefixes(PrefixCache(1 << 20))
    assert not pipe.engine.core.sequences
    assert streamed([piece, *stream]) == alone[PROMPTS[1]]


@pytest.mark.parametrize("wrong", [False, True])
def test_what_ends_a_stream_of_asyncio_ends_its_request(wrong, alone):
    """Also a cancelled task whose request is still encoded, or has a mistake; a loop that is closed hears nothing."""
    pipe, made, entered, release = pipeline(Recycle()), [], threading.Event(), threading.Event()
    begin, step = pipe._begin, pipe.engine.core.step

    def watched(request, sink):
        entered.set()
        assert release.wait(60)
        made.append((*begin(request, sink), sink))
        return made[-1][:2]

    async def scenario():
        release.set()
        assert streamed([piece async for piece in pipe.astream(PROMPTS[1], **KEYWORDS)]) == alone[PROMPTS[1]]
        pipe.engine.core.step = lambda: (time.sleep(0.1), step())[1]
        pieces = pipe.astream(PROMPTS[1], max_new_tokens=60)
        assert (await anext(pieces)).finish_reason is None
        await pieces.aclose()
        entered.clear()
        release.clear()
        task = asyncio.ensure_future(anext(pipe.astream("" if wrong else PROMPTS[1], max_new_tokens=60)))
        await asyncio.to_thread(entered.wait, 60)
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, release.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [one.done for one, *_ in made] == [True] * (2 if wrong else 3)

    pipe._begin = watched
    asyncio.run(scenario())
    made[0][2](None)


@pytest.mark.parametrize("from_where", ["logits_processor", "stopping_criteria"])
def test_a_request_from_within_a_request_is_refused(from_where):
    pipe = pipeline()

    def asks(*arguments, **_):
        return pipe.generate(PROMPTS[0], **KEYWORDS)

    with pytest.raises(UserError, match=r"^a logits processor or stopping criterion cannot call its own pipeline$"):
        pipe.generate(PROMPTS[1], **KEYWORDS, **{from_where: [asks]})
    assert pipe.generate(PROMPTS[0], **KEYWORDS)


def test_a_drafter_that_one_target_refuses_is_free_for_others(alone):
    class Choosy(Ngram):
        refuses = True

        def attach(self, target):
            if self.refuses:
                raise UserError("made for another target")

    drafter = Choosy()
    with pytest.raises(UserError, match="made for another target"):
        pipeline(drafter)
    drafter.refuses = False
    answer = in_thread(lambda: pipeline(drafter).generate(PROMPTS[0], **KEYWORDS))
    assert answer.token_ids == alone[PROMPTS[0]]


def test_a_drafter_follows_the_pipeline_that_uses_it():

    class Loyal(Ngram):
        def attach(self, target):
            self.target = target

        def propose(self, token, plan):
            assert self.target is using.target
            return super().propose(token, plan)

    drafter = Loyal()
    pipes = [pipeline(drafter), pipeline(drafter)]
    for using in (*pipes, *pipes):
        using.generate(PROMPTS[1], **KEYWORDS)


def test_members_of_a_union_are_held_with_it(alone):
    shared = Recycle()
    first, second = pipeline(Union([shared, Ngram()])), pipeline(shared)
    using, observe = [], shared.observe

    def follow(tree, verdict, output):
        using.append(policy._OWNERS[id(shared)])
        observe(tree, verdict, output)

    shared.observe = follow
    stream, piece = begun(first)
    assert second.generate(PROMPTS[0], **KEYWORDS).token_ids == alone[PROMPTS[0]]
    assert streamed([piece, *stream]) == alone[PROMPTS[1]]
    assert [key for key, _ in itertools.groupby(using)] == [first._speculation, second._speculation]


def test_ctrl_c_ends_one_request(alone):
    pipe = pipeline(Recycle())
    stream, piece = begun(pipe)
    main, steps, step = threading.main_thread().ident, itertools.count(), pipe.engine.core.step

    def interrupt():
        if next(steps) == 3:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.5)
        step()

    pipe.engine.core.step = interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            pipe.generate(PROMPTS[0], max_new_tokens=40, nodes=6)
    finally:
        signal.signal(signal.SIGINT, before)
    assert streamed([piece, *stream]) == alone[PROMPTS[1]]
    assert free(pipe)


def test_requests_that_differ_in_their_drafter_wait_for_each_other(alone):
    first, second, plain = shared_pipelines("target")
    assert first.engine is second.engine is plain.engine
    sets, step = [], first.engine.core.step

    def watch():
        step()
        sets.append({first.engine.core.key.speculation for _ in first.engine.core.running})

    first.engine.core.step = watch
    pipes = [first, second, first, plain, second]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda pipe: pipe.generate(PROMPTS[1], **KEYWORDS).token_ids, pipes))
    assert answers == [alone[PROMPTS[1]]] * 5
    assert {len(running) for running in sets} <= {0, 1}
    assert set().union(*sets) == {pipe._speculation for pipe in pipes}


def test_a_model_is_freed_with_its_pipeline():
    pipe = pipeline(Recycle())
    pipe.generate(PROMPTS[0], **KEYWORDS)
    pipe.engine.drain()
    engine, kept = weakref.ref(pipe.engine), weakref.ref(pipe.target)
    del pipe
    gc.collect()
    assert engine() is None
    assert kept() is None


def test_a_program_ends_beside_a_stream_that_nobody_reads():
    program = """
import mmspec
from tests.tiny import byte_model, byte_tokenizer
stream = mmspec.load(byte_model(), None, processor=byte_tokenizer()).stream("a", max_new_tokens=100_000)
next(stream)
print("ended")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
