"""Decode steps are captured before the first request; captures are recorded and replayed on a CPU."""

import copy

import pytest
import torch

import mmspec
from mmspec import plugins
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.recycle import Recycle
from mmspec.engine import warm_up
from mmspec.engine.policy import STEADY_PLANS
from mmspec.engine.sequence import DecodeRequest
from mmspec.engine.stopping import Stopper
from mmspec.ops import graphs
from mmspec.pipeline import Pipeline
from mmspec.sampling.sampler import Sampler
from mmspec.serving.settings import Limits, ServerSettings
from mmspec.targets.transformers_target import TransformersTarget
from tests import matrix
from tests.device import Replayed, record_captures
from tests.tiny import shared_model

MEMORY = 1 << 30


@pytest.fixture
def _recorded(monkeypatch, tmp_path):
    record_captures(monkeypatch)
    monkeypatch.setattr(warm_up, "_free_bytes", lambda device: MEMORY)
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))


def pipeline(name, kind, device="cpu"):
    model = shared_model(name)
    drafter = matrix.drafter_of(kind, model, "captured")
    model = model if device == "cpu" else copy.deepcopy(model).to(device)
    return Pipeline(plugins.target_class(model.config)(model), None, drafter, max_num_seqs=3)


def prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]


def check_answers(pipe, lengths, new, size=None):
    """Answers of different lengths, whose rows join and leave in turn, equal the answers of ``generate``.

    Args:
        size: draft tokens.
    """
    given = [Prompt(torch.tensor([ids], device=pipe.target.device)) for ids in prompts(lengths)]
    with pipe.engine.together():
        rows = [
            pipe.submit(DecodeRequest(prompt, Sampler(), Stopper(count), size), lambda _: None)
            for prompt, count in zip(given, new, strict=True)
        ]
    pipe.engine.drain()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        for prompt, count, row in zip(given, new, rows, strict=True):
            expected = pipe.model.generate(prompt.input_ids, max_new_tokens=count, **settings)
            assert row.error is None
            assert row.token_ids == expected[0, prompt.input_ids.shape[1] :].tolist()


CASES = [("llava", kind) for kind in ("plain", "msd", "flash", "recycle", "ngram", "early-exit", "dflash")]
CASES += [("llava_bamba", "msd"), ("falcon_mamba", "ngram")]
CASES += [("bamba", kind) for kind in ("plain", "recycle", "small", "mamba")]


BATCHES = [((9,), (24,)), ((9, 12, 5, 8, 7), (24, 9, 16, 12, 20)), ((5, 9), (12, 20))]


def check_nothing_is_captured(pipe, captures):
    """Answers after the warm-up capture nothing and move no buffers.

    Args:
        captures: number of captures so far.
    """
    pipe.warm_up(tokens=64, num_draft_tokens=[7])
    before = captures(), pipe.target.version
    assert before[0]
    for lengths, new in BATCHES:
        check_answers(pipe, lengths, new, 7)
    assert (captures(), pipe.target.version, graphs.capture_failure()) == (*before, None)


@pytest.mark.long
@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_answers_capture_nothing(name, kind):
    check_nothing_is_captured(pipeline(name, kind), lambda: Replayed.captures)
    assert Replayed.replays > Replayed.captures


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_answers_on_a_gpu_capture_nothing(name, kind, monkeypatch):
    captured, capture = [], graphs._captured
    monkeypatch.setattr(graphs, "_captured", lambda run, device: captured.append(run) or capture(run, device))
    check_nothing_is_captured(pipeline(name, kind, "cuda"), lambda: len(captured))


@pytest.mark.long
@pytest.mark.usefixtures("_recorded")
def test_adaptive_drafts_use_captured_steps():
    pipe = pipeline("llava", "msd")
    pipe.warm_up(1, 128)
    captures = Replayed.captures
    check_answers(pipe, (9,), (60,))
    assert Replayed.captures == captures


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("kind", ["plain", "msd"])
def test_longer_prompts_and_more_rows_are_captured_anew(kind):
    pipe = pipeline("llava", kind)
    pipe.warm_up(1, 128, [7])
    captures = [Replayed.captures]
    for _ in range(3):
        check_answers(pipe, (9, 150, 5), (20, 20, 12), 7)
        captures.append(Replayed.captures)
    assert captures[0] < captures[2] == captures[3]


@pytest.mark.usefixtures("_recorded")
def test_nothing_is_learnt_and_nothing_kept():
    target, drafter = TransformersTarget(shared_model("llama")), Recycle(4)
    table = {(-1, 0): {5: 0.5}, (0, 0): {7: 0.25}, (-1, 9): {3: 0.75}}
    drafter._table = {context: dict(ranking) for context, ranking in table.items()}
    drafter._vocab = target.config.vocab_size
    pipe = Pipeline(target, None, drafter, prefix_cache=1 << 20)
    state = torch.get_rng_state()
    pipe.warm_up(2, 64, [7])
    assert torch.equal(torch.get_rng_state(), state)
    assert {context: pytest.approx(row) for context, row in drafter._rankings().items()} == table
    assert (target.runner.rows, drafter._on_device.rows, drafter.learned) == (0, 0, 0)
    assert drafter._on_device._pending == []
    assert len(pipe.engine.prefixes) == 0


@pytest.mark.parametrize(
    ("free", "rows", "tokens", "expected"),
    [
        (1 << 40, 8, None, (8, 8192)),
        (1 << 40, 6, 100, (6, 100)),
        (8 * 3000, 3, None, (3, 3000)),
        (8 * 2000, 3, None, (2, 4000)),
        (8 * 1000, 8, None, (1, 4000)),
        (8 * 1000, 8, 400, (8, 400)),
    ],
)
def test_memory_that_is_reserved(free, rows, tokens, expected, monkeypatch):
    """Half of the free memory, with a byte per token."""
    monkeypatch.setattr(warm_up, "_token_bytes", lambda cache: 1)
    monkeypatch.setattr(warm_up, "_free_bytes", lambda device: free)
    target = TransformersTarget(shared_model("llama"))
    target.context_limit = 1 << 20
    assert warm_up._reservation(target, rows, tokens) == expected
    target.context_limit = 300
    assert warm_up._reservation(target, 1, tokens)[1] <= 300


@pytest.mark.usefixtures("_recorded")
def test_memory_that_is_reserved_serves_more_rows():
    """Three rows take the slots that were reserved for one row; longer rows then make the buffers grow."""
    pipe = pipeline("llama", "plain")
    pipe.target.context_limit = 4096
    pipe.warm_up(1, 1200)
    kv, config = pipe.target.runner.cache.kv, pipe.target.config
    assert (kv.rows, kv.capacity) == (1, 1280)
    size = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert warm_up._token_bytes(pipe.target.runner.cache) == size
    check_answers(pipe, (9, 12, 5), (20, 20, 30))
    assert (kv.rows, kv.capacity) == (4, 512)
    pipe.warm_up(3, 1200)
    assert (kv.rows, kv.capacity) == (4, 1280)


@pytest.mark.usefixtures("_recorded")
def test_larger_steps_are_left_to_requests(monkeypatch):
    monkeypatch.setattr(warm_up, "_MOST_NODES", 16)
    seen = []
    target = TransformersTarget(shared_model("llama"))
    forward = target.verify
    monkeypatch.setattr(target, "verify", lambda tree, *rest: seen.append(tree.tokens.shape) or forward(tree, *rest))
    # Three rows are padded to four.
    warm_up.reserve_and_capture(target, None, 3, 64, [StepPlan(7), StepPlan(4), StepPlan(3)])
    assert sorted({tuple(shape) for shape in seen}) == [
        *((1, 1), (1, 2), (1, 4), (1, 8)),
        *((2, 1), (2, 2), (2, 4), (2, 8)),
        *((3, 1), (3, 2), (3, 4)),
    ]


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("sizes", [(None,), (12, 0)])
def test_every_plan_that_is_asked_for_is_captured(sizes, monkeypatch):
    """Largest first, so that smaller steps share the memory of larger steps."""
    plans = []
    monkeypatch.setattr(warm_up, "reserve_and_capture", lambda *known: plans.extend(known[-1]))
    pipeline("llama", "dflash").warm_up(1, num_draft_tokens=sizes)
    assert set(plans) == (set(STEADY_PLANS) if None in sizes else {StepPlan(12)})
    assert [plan.nodes for plan in plans] == sorted((plan.nodes for plan in plans), reverse=True)


@pytest.mark.usefixtures("_recorded")
def test_a_lack_of_memory_is_a_warning(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("out of memory")

    pipe = pipeline("llama", "plain")
    monkeypatch.setattr(warm_up, "_reservation", fails)
    with pytest.warns(RuntimeWarning, match="CUDA graphs could not be captured beforehand: out of memory"):
        pipe.warm_up(1)
    check_answers(pipe, (9,), (12,))


def test_on_a_cpu_nothing_is_done(monkeypatch):
    pipe = mmspec.load(shared_model("llama"), drafter="recycle", processor=object())
    pipe.warm_up(4)
    assert pipe.target.runner._cache is None


def test_how_many_sequences_are_warmed_up(monkeypatch):
    asked = []
    monkeypatch.setattr("mmspec.pipeline.warm_up", lambda engine, speculation, *asking: asked.append(asking))
    mmspec.load("tiny-llava", drafter=None)
    mmspec.load("tiny-llava", drafter=None, warm_up=0)
    mmspec.load("tiny-llava", drafter=None, warm_up=3)
    mmspec.load("tiny-llava", drafter=None, max_num_seqs=5, warm_up=0).warm_up(tokens=9, num_draft_tokens=[4])
    loading = {"model": "tiny-llava", "drafter": "none", "device": "cpu", "dtype": "auto", "generation_config": "auto"}
    monkeypatch.setattr("mmspec.ops.cpu.give_back_freed_memory", lambda: asked.append("memory"))
    ServerSettings(loading, Limits(max_running=6, max_model_len=700), {}).pipelines()
    every = (None,)
    assert asked == [(1, None, every), (3, None, every), (5, 9, [4]), "memory", (6, 700, every)]
    with pytest.raises(mmspec.UserError, match=r"^tokens must be"):
        mmspec.load("tiny-llava", drafter=None).warm_up(tokens=0)
    with pytest.raises(mmspec.UserError, match=r"^warm_up must be"):
        mmspec.load("tiny-llava", warm_up=-1)
