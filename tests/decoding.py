"""Decoding step by step, by an engine of its own."""

import gc
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import FrameType

import torch

import mmspec
from mmspec.core.plan import StepPlan
from mmspec.engine.engine import Engine
from mmspec.engine.policy import DraftPolicy, Speculation
from mmspec.engine.sequence import DecodeRequest
from mmspec.ops import kernels
from tests.tiny.models import text_inputs


def requests_of(prompt, sampler, stopper, nodes=None, **options):
    """A request for each row of a prompt, without padding in its history."""
    rows = [
        row if row.is_single else replace(row, history=torch.tensor([ids]))
        for row, ids in zip(prompt.rows(), prompt.unpadded(), strict=True)
    ]
    return [
        DecodeRequest(row, sampler, stopper, nodes, index, generator, **options)
        for index, (row, generator) in enumerate(zip(rows, sampler.generators(len(rows)), strict=True))
    ]


def answered(pipe, prompt, sampler, stopper, nodes=None):
    """The sequences of a prompt's rows, after their ends."""
    requests = requests_of(prompt, sampler, stopper, nodes)
    futures = [Future() for _ in requests]
    with pipe.engine.together():
        rows = [pipe.submit(request, one.set_result) for request, one in zip(requests, futures, strict=True)]
    assert [one.result(300).error for one in futures] == [None] * len(rows)
    return rows


class _OnePolicy(Speculation):
    """Requests with a fixed number of draft tokens have the same policy."""

    def policy(self, num_draft_tokens):
        return self.adaptive


class SteppedEngine(Engine):
    """An engine without a worker thread, for one drafter: ``wait`` runs the steps in the caller's thread.

    Args:
        policy: policy of all requests, or the plan of all steps.
        prefixes: the prefix cache.
    """

    def __init__(self, target, drafter, policy, prefixes=None, **settings):
        super().__init__(target, **settings)
        if prefixes is not None:
            self.use_prefixes(prefixes)
        if isinstance(policy, StepPlan):
            policy = DraftPolicy(policy, kernels.static_shapes(target.device))
        self.speculation = _OnePolicy(target, drafter, policy)

    @property
    def drafter(self):
        return self.speculation.drafter

    def add(self, prompt, sampler, stopper, nodes=None, sink=lambda delta: None, **options):
        """The sequences of a prompt's rows."""
        requests = requests_of(prompt, sampler, stopper, nodes, streams=True, **options)
        return [self.submit(request, self.speculation, sink) for request in requests]

    def wait(self, ready):
        while not ready():
            assert self._has_work()
            self._turn()

    def remove(self, sequences):
        super().remove(sequences)
        self.core.remove_finished()
        self._has_work()

    def _wake(self):
        pass


def decode(target, drafter, prompt, sampler, stopper, policy, **settings):
    """The sequences of a prompt after each step; ``emitted`` of each holds its tokens of this step."""
    engine = SteppedEngine(target, drafter, policy, **settings)
    new = []
    rows = engine.add(prompt, sampler, stopper, sink=new.append)
    read = [row.prompt_length for row in rows]
    try:
        while not all(row.done for row in rows):
            new.clear()
            engine.wait(lambda: new)
            for number, row in enumerate(rows):
                if row.error:
                    raise row.error
                row.emitted, read[number] = row.history[read[number] :], len(row.history)
            yield rows
    finally:
        engine.remove(rows)


def assert_threads_share(model):
    """Two speculations and transformers' own decoding at the same time, through one model."""
    inputs = [text_inputs(1, 9, seed) for seed in range(3)]
    options = dict(max_new_tokens=24, do_sample=False)
    expected = [model.generate(**i, **options) for i in inputs]

    def ours(i):
        return mmspec.generate(model, drafter="recycle", nodes=6, **i, **options)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            jobs = [pool.submit(ours, inputs[0]), pool.submit(ours, inputs[1])]
            jobs.append(pool.submit(lambda: model.generate(**inputs[2], **options)))
            assert all(torch.equal(job.result(), wanted) for job, wanted in zip(jobs, expected, strict=True))


def assert_idle(engine):
    """An engine without requests has no rows."""
    assert (engine.core.running, engine.core._prefilled, engine.core.queued) == ([], [], [])
    assert engine.target.runner.rows == 0


def assert_forgotten(ended):
    """The token histories of sequences that have ended are kept by nobody but these and the frames of their errors."""
    own = [*ended, *map(vars, ended)]
    for one in gc.get_referrers(*(sequence.history for sequence in ended)):
        kept = not any(one is known for known in own) and not isinstance(one, FrameType)
        assert not kept, f"an ended sequence's tokens are kept in {one!r}"
