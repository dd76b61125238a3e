"""Whole answers on a fake CUDA device: devices are not mixed, and captured steps can be captured.

One device-to-host copy per step: which processors need more, and steps in which torch forbids others on a GPU. On a
CPU, ``tests/mmspec/engine/test_matrix.py`` counts them.
"""

import copy

import pytest
import torch
from transformers.generation import logits_process as hf

from mmspec import SamplingParams, TokenTree, accept_path, ops, plugins
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.core.verify import Verdict
from mmspec.engine import warm_up
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from mmspec.sampling.batch_sampler import BatchSampler
from mmspec.sampling.sampler import Sampler, SamplingState
from tests import matrix
from tests.decoding import decode
from tests.device import as_launches, on_a_gpu, waiting
from tests.mmspec.sampling.test_sampler import PROCESSORS, VOCAB, histories_and_tree, rows_of
from tests.targets import prompt_of
from tests.tiny import byte_tokenizer, shared_model
from tests.tiny.models import text_inputs

pytest.importorskip("triton")
from tests.fake_cuda import fake_cuda, on_fake_cuda, to_cuda
from tests.launches import LAYERS, measure

TOWERS = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Targets whose vision towers have shapes that depend on values, or operations that a fake device lacks."""
CASES = [
    (name, kind)
    for name, kind in matrix.STATIC
    if name not in TOWERS and (name not in ("llama", "bamba") or kind == "ngram")
]
GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=0.8, top_k=9)
WAITING = {"eta", "top-h", "length decay", "watermark", "prefix", "subclass", "subclass, padding ignored"}
"""transformers' processors that read values on the host, and processors that run path by path."""


@pytest.mark.long
@pytest.mark.parametrize(("batch", "params"), [(1, GREEDY), (3, DRAWN)], ids=["1-greedy", "3-drawn"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_answer(name, kind, batch, params, monkeypatch):
    model = copy.deepcopy(shared_model(name))
    drafter = matrix.drafter_of(kind, model, "captured")
    inputs = matrix.inputs_of(name, 2, batch)
    sampler = Sampler(defaults.processors(params), do_sample=params.do_sample)
    with fake_cuda(monkeypatch) as device:
        to_cuda(model)
        target = plugins.target_class(model.config)(model)
        if drafter is not None:
            drafter.attach(target)
        inputs = {name: on_fake_cuda(value) for name, value in inputs.items() if name != "attention_mask"}
        ids = inputs.pop("input_ids")
        running = decode(target, drafter, Prompt(ids, None, inputs), sampler, Stopper(12, criteria=[]), StepPlan(5, 3))
        next(running)
        for _ in range(6):
            device.reads.clear()
            device.copies = 0
            next(running)
        assert device.reads == {"tolist": 1}
        assert device.copies == 0
        running.close()
    assert device.captured


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), [("llava", "msd"), ("llava", "recycle"), ("bamba", "small")])
def test_an_answer_after_the_warm_up(name, kind, monkeypatch):
    model = copy.deepcopy(shared_model(name))
    drafter = matrix.drafter_of(kind, model, "captured")
    monkeypatch.setattr(warm_up, "_free_bytes", lambda device: 1 << 30)
    with fake_cuda(monkeypatch) as device:
        to_cuda(model)
        target = plugins.target_class(model.config)(model)
        drafter.attach(target)
        warm_up.reserve_and_capture(target, drafter, 1, 64, [StepPlan(7)])
        captured = device.captured
        assert captured
        prompt = Prompt(on_fake_cuda(text_inputs(1)["input_ids"]))
        running = decode(target, drafter, prompt, Sampler(), Stopper(12, criteria=[]), StepPlan(7))
        for _ in range(6):
            next(running)
        assert device.captured == captured
        running.close()


ROWS = [  # batch, nodes, vocabulary, top-p, and rows of scores that are warped: six levels, or all nodes at once
    (1, 6, 150_000, 0.9, 6),
    (1, 16, 150_000, 0.9, 16),
    (1, 60, 150_000, 0.9, 6),
    (1, 60, 150_000, 1.0, 60),
    (1, 60, 30_000, 0.9, 60),
    (8, 6, 150_000, 0.9, 48),
    (8, 60, 30_000, 0.9, 48),
    (8, 60, 150_000, 1.0, 48),
]


@pytest.mark.long
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(("batch", "nodes", "vocab", "top_p", "rows"), ROWS)
def test_tokens_are_drawn_at_few_nodes_without_the_host(batch, nodes, vocab, top_p, rows, drawn, monkeypatch):
    warped, draw = [], ops.choose_drawn if drawn else ops.sample
    note = lambda *args: warped.append(args[drawn].shape[:2].numel()) or draw(*args)  # noqa: E731
    monkeypatch.setattr(ops, draw.__name__, note)
    sampler = defaults.sampler(SamplingParams(temperature=0.8, top_p=top_p, seed=0))
    with fake_cuda(monkeypatch) as device:
        tokens, parents = (torch.zeros(batch, nodes, dtype=torch.long, device="cuda") for _ in range(2))
        logits, probs = (torch.zeros(batch, nodes, vocab, device="cuda") for _ in range(2))
        tree = TokenTree(tokens, parents, draft_probs=probs if drawn else None, check=False)
        tree.max_depth = 5
        sequences = [SamplingState([5], sampler, generator=torch.Generator()) for _ in range(batch)]
        verdict = accept_path(tree, BatchSampler().choose(sequences, tree, logits).tokens)
        assert verdict.packed.shape == (batch, 14)
        assert (sum(warped), device.reads, device.copies) == (rows, {}, 0)


@pytest.mark.long
@pytest.mark.parametrize("aligned", [False, True])
def test_grammar_masks_are_copied_from_pinned_memory(aligned, monkeypatch):
    pytest.importorskip("llguidance")
    from mmspec.sampling.grammar import Grammars

    grammar = Grammars(byte_tokenizer(), [2]).compile("regex", "[a-d]{1,9}")
    history = byte_tokenizer()("Say it: ").input_ids
    with fake_cuda(monkeypatch, strict=False) as device:
        sampler = Sampler(constraint=grammar, do_sample=aligned, aligned=aligned)
        sequences = [SamplingState(list(history), sampler, generator=torch.Generator()) for _ in range(3)]
        tree = TokenTree.root(torch.zeros(3, dtype=torch.long, device="cuda"))
        choices = BatchSampler().choose(sequences, tree, torch.zeros(3, 1, 259, device="cuda"))
        assert choices.tokens.shape == (3, 1)
        assert not any(choices.failures)
        assert device.copies == 0


@pytest.mark.parametrize(
    ("drafter", "draft"), [("none", 0), ("msd", 145), ("flash", 145), ("eagle3", 158), ("dflash", 115)]
)
def test_launches_of_a_step(drafter, draft):
    """Few in a layer and in a draft, few outside of graphs, and none of either that grows unnoticed."""
    found = measure(drafter)
    parts = {name: counts.total() for name, counts in found["parts"].items()}
    assert parts["_pass"] / LAYERS < 11
    assert parts.get("_grown", 0) <= draft
    assert parts["commit_on_device"] <= 10
    assert found["outside"].total() <= (20 if draft else 10)
    assert found["graphs"].total() == (3 if draft else 2)


SAMPLING = {
    "greedy": lambda: Sampler(),
    "top-k": lambda: Sampler(defaults.processors(SamplingParams(temperature=0.8, top_k=20)), do_sample=True),
    "top-p": lambda: Sampler(defaults.processors(SamplingParams(temperature=1.0, top_p=0.9)), do_sample=True),
    "what was said": lambda: Sampler(
        [
            hf.RepetitionPenaltyLogitsProcessor(1.1),
            hf.NoRepeatNGramLogitsProcessor(3),
            hf.NoBadWordsLogitsProcessor([[3], [4, 5]]),
            hf.MinNewTokensLengthLogitsProcessor(9, 20, 7),
        ]
    ),
}


def steps(name, kind, batch, sampling, plan):
    """An answer step by step on a GPU; the first of the rows ends early."""
    target = matrix.new_target(name, "cuda")
    drafter = matrix.drafter_of(kind, target.model, "captured")
    if drafter is not None:
        drafter.attach(target)
    inputs = on_a_gpu(matrix.inputs_of(name, 2, batch), "cuda")
    stopper = Stopper(60, criteria=[])
    for rows in decode(target, drafter, prompt_of(inputs), SAMPLING[sampling](), stopper, plan):
        if batch > 1 and len(rows[0].token_ids) > 8:
            rows[0].finish_reason = "stop"
        yield rows


@pytest.mark.long
@pytest.mark.usefixtures("at_every_node")
@pytest.mark.parametrize("name", PROCESSORS)
def test_which_processors_wait(name, monkeypatch):
    as_launches(monkeypatch)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile leaves it False
    history, tree = histories_and_tree(0)
    logits, sampler = torch.randn(3, tree.nodes, VOCAB), BatchSampler()
    rows = rows_of(Sampler(PROCESSORS[name]()), history)
    sampler.choose(rows, tree, logits)
    with waiting() as counts:
        sampler.choose(rows, tree, logits)
    assert bool(counts) == (name in WAITING)


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "kind"), matrix.STATIC)
def test_torch_finds_no_other_waiting(name, kind, batch, sampling, monkeypatch):
    copies, host = [], Verdict.host.func

    def only_copy(verdict):
        torch.cuda.set_sync_debug_mode("default")
        copies.append(host(verdict))
        torch.cuda.set_sync_debug_mode("error" if len(copies) > 3 else "default")
        return copies[-1]

    found = type(Verdict.host)(only_copy)
    found.__set_name__(Verdict, "host")
    monkeypatch.setattr(Verdict, "host", found)
    plan = StepPlan(0 if kind == "plain" else 12, 4)
    try:
        for _, rows in zip(range(12), steps(name, kind, batch, sampling, plan), strict=False):
            assert len(rows) == batch
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 4 < len(copies) <= 11
