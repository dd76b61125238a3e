"""Captured passes give what passes give; on a CPU, recorded and replayed in their place."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmspec import TokenTree, accept_path, plugins
from mmspec.core.plan import StepPlan
from mmspec.engine.stopping import Stopper
from mmspec.ops import graphs
from mmspec.ops.graphs import Graphed
from mmspec.sampling.sampler import Sampler
from mmspec.targets.transformers_target import TransformersTarget
from tests import matrix
from tests.decoding import decode
from tests.device import Replayed, record_captures
from tests.targets import prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.models import text_inputs, vision_inputs

pytestmark = pytest.mark.long


@pytest.fixture
def _recorded(monkeypatch):
    record_captures(monkeypatch)


class Counter:
    """State that a function changes in place."""

    def __init__(self, device="cpu"):
        self.total = torch.zeros(2, device=device)
        self.run = 0
        self.step = Graphed(self.add)

    def add(self, x, factor=1):
        self.run += 1
        self.total += factor * x
        return (self.total * 2,)


def check_calls(counter, device="cpu"):
    """Results and state equal plain calls, with or without captures."""
    total = torch.zeros(2)
    for number in range(6):
        for factor in (1, 3):
            x = torch.tensor([1.0, float(number)])
            total += factor * x
            (out,) = counter.step(x.to(device), version="a", factor=factor)
            assert torch.equal(out.cpu(), 2 * total)
    assert torch.equal(counter.total.cpu(), total)


def test_elsewhere_a_function_is_called():
    counter = Counter()
    check_calls(counter)
    assert (counter.run, counter.step.captured) == (12, 0)


@pytest.mark.usefixtures("_recorded")
def test_calls_are_replayed_from_the_third_on():
    counter, before = Counter(), graphs.num_captures()
    check_calls(counter)
    assert (counter.run, counter.step.captured, Replayed.replays) == (4, 2, 10)
    assert graphs.num_captures() == before + 2
    counter.step(torch.ones(2), version="b")  # other addresses: the captured graph cannot be reused
    assert (counter.run, counter.step.captured) == (5, 0)


@pytest.mark.usefixtures("_recorded")
def test_a_copy_captures_for_itself():
    counter = Counter()
    check_calls(counter)
    other = copy.deepcopy(counter)
    other.step(torch.ones(2), version="a")
    assert torch.equal(other.total, counter.total + 1)
    assert other.step.captured == 0


class Stops(TorchDispatchMode):
    """Raises at the tenth operation."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        if self.calls == 10:
            raise NotImplementedError("operation not permitted")
        return func(*args, **(kwargs or {}))


class Failing:
    """Captures, until the capture of this number fails: inside the function, or at its end.

    Attributes:
        tried: captures that were begun.
    """

    def __init__(self, number, inside=False):
        self.number, self.inside, self.tried = number, inside, 0

    def __call__(self, run, device):
        self.tried += 1
        with Stops() if self.inside and self.tried == self.number else nullcontext():
            captured = Replayed(run, device)
        if self.tried == self.number:
            raise RuntimeError("operation failed due to a previous error during capture")
        return captured


@pytest.mark.usefixtures("_recorded")
def test_after_a_failed_capture_nothing_is_captured(monkeypatch):
    """In no function of the process; graphs that exist are replayed."""
    failing = Failing(2)
    monkeypatch.setattr(graphs, "_captured", failing)
    early, late, other = Counter(), Counter(), Counter()
    early.step(torch.ones(2))
    early.step(torch.ones(2))
    assert graphs.capture_failure() is None
    with pytest.warns(RuntimeWarning, match="CUDA graph capture failed, steps run eagerly: operation failed"):
        check_calls(late)
    check_calls(other)
    early.step(torch.ones(2))
    assert torch.equal(early.total, torch.full((2,), 3.0))
    assert early.step.captured == 1
    assert (early.run, late.run, other.run) == (2, 13, 12)  # one of them the failed capture
    assert failing.tried == 2
    failure = graphs.capture_failure()
    assert failure.startswith("capture of Counter.add of torch.float32 (2,), {'factor': 1}\nTraceback")
    assert failure.endswith("RuntimeError: operation failed due to a previous error during capture\n")


class Torch211:
    """Captures of torch 2.11 that fail: their stream stays current, and the allocator stays recording."""

    def __init__(self):
        self.current, self.begun, self.recording = "main", 0, False

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.begun += 1
        assert not self.recording, "empty_cache"
        self.current, self.recording = stream, True
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("inside", [True, False])
def test_a_failed_capture_of_torch(inside, monkeypatch):
    """The current stream and the lock are as before, and no other capture finds the allocator recording."""
    torch211 = Torch211()
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch211, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: torch211.current)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(graphs, "_shared", lambda _: ("pool", "side", "keeper"))
    monkeypatch.setattr(graphs, "captures", lambda _: True)
    monkeypatch.setattr(graphs, "_failure", None)

    def add(x):
        if inside and torch211.current == "side":
            raise ZeroDivisionError("not while it is captured")
        return (x + 1,)

    steps = [step for step in (Graphed(add), Graphed(add)) for _ in range(4)]
    with pytest.warns(RuntimeWarning, match="previous error") as warned:
        results = [step(torch.ones(2))[0] for step in steps]
    assert all(torch.equal(result, torch.full((2,), 2.0)) for result in results)
    assert (len(warned), torch211.begun, torch211.current) == (1, 1, "main")
    assert not graphs._CAPTURE_LOCK.locked()
    assert ("not while it is captured" in graphs.capture_failure()) == inside


# ---------------------------------------------------------------------- whole answers


@pytest.mark.long
@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "kind"), [("llava", "msd"), ("llava", "early-exit"), ("bamba", "small")])
def test_answers_after_a_failed_capture(name, kind, number, inside, monkeypatch):
    """The step of the failed capture runs again from the states before it."""
    failing, model = Failing(number, inside), shared_model(name)
    monkeypatch.setattr(graphs, "_captured", failing)
    target, drafter = matrix.new_target(name), matrix.drafter_of(kind, model, "captured")
    drafter.attach(target)
    requests = [matrix.asked(name, "greedy", place) for place in (3, 4, 5)]

    def answer(request):
        *_, (row,) = decode(target, drafter, request.prompt, Sampler(), request.stopper, matrix.Some(StepPlan(12, 4)))
        return row.token_ids

    with pytest.warns(RuntimeWarning, match="CUDA graph capture failed"):
        found = [answer(request) for request in requests]
    assert found == [request.tokens for request in requests]
    assert failing.tried == number
    assert graphs.capture_failure()


@pytest.mark.usefixtures("_recorded")
def test_drafters_in_turn_find_their_graphs(monkeypatch):
    """Drafters that read other features of one target; the target keeps the passes that it has captured for each."""
    model = shared_model("llava")
    target = plugins.target_class(model.config)(model)
    drafters = [matrix.drafter_of(kind, model, "captured") for kind in ("msd", "dflash")]
    for drafter in drafters:
        drafter.attach(target)
    assert drafters[0].features != drafters[1].features
    captured = []
    for _ in range(2):
        for drafter in drafters:
            for _ in range(3):
                prompt = prompt_of(vision_inputs("llava", 1))
                for _ in decode(target, drafter, prompt, Sampler(), Stopper(12), StepPlan(12, 4)):
                    pass
            captured.append(target.runner.captured[0])
    assert captured[0] < captured[1] == captured[2] == captured[3]


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("batch", [1, 3])
def test_a_new_prompt_may_keep_longer_paths(batch):
    """Its passes are replayed from the start, while keeping a path of that length is still to be captured."""
    target, fresh = (TransformersTarget(shared_model("bamba")) for _ in range(2))
    tokens = torch.arange(8).expand(batch, -1)
    star = TokenTree(tokens, torch.tensor([-1] + 7 * [0]).expand(batch, -1))
    chain = TokenTree(tokens, torch.arange(-1, 7).expand(batch, -1))
    for seed, tree in enumerate((star, star, chain)):
        prompt = prompt_of(text_inputs(batch, 9, seed=seed))
        for side in (target, fresh) if tree is chain else (target,):
            side.keep([])
            prefilled(side, prompt, 60)
            for _ in range(4):
                side.verify(tree)
                side.commit(accept_path(tree, tokens.roll(-1, 1)))
    root = TokenTree.root(tokens[:, 0])
    torch.testing.assert_close(target.verify(root).logits, fresh.verify(root).logits)


@pytest.mark.gpu
def test_calls_on_a_gpu():
    counter = Counter("cuda")
    check_calls(counter, "cuda")
    assert (counter.run, counter.step.captured) == (4, 2)
