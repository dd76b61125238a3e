"""Training of the embedded hybrid model: layers against transformers', labels, resuming, export."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.bamba import modeling_bamba
from transformers.models.bamba.modeling_bamba import BambaMixer, mamba2_chunk_scan
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule

pytest.importorskip("accelerate")

from accelerate import Accelerator

from mmspec.ssm.cli.models import tiny_hybrid
from mmspec.ssm.texts import KINDS, example
from mmspec.ssm.training.architecture import GATED_DELTANET, MAMBA2, STEP_SIZES, Architecture, new_model
from mmspec.ssm.training.delta import chunk_delta
from mmspec.ssm.training.layers import chunk_scan, fast_layers
from mmspec.ssm.training.task import FIRST_SHARE, MIXED_FROM, HybridTask, collate, encode, make_tokenizer, text_loss
from mmspec.training.loss import IGNORE
from mmspec.training.plan import MIXED, POOL, TEXT, TrainingPlan
from mmspec.training.trainer import CHECKPOINT, LOG, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Architecture(32, 3, (1,), 2, 1, 4, 8, 32, 256, 400)
MODELS = {MAMBA2: SMALL, GATED_DELTANET: replace(SMALL, recurrent=GATED_DELTANET)}


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return make_tokenizer((example(index) for index in range(300)), 400)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Trainer]:
    """Starts or resumes a run of a tiny model in a named folder."""

    def run(name: str, **settings: object) -> Trainer:
        folder = tmp_path / name
        task = HybridTask(folder, 48, batch=4, architecture=SMALL, held_out=2)
        plan = TrainingPlan(**{"steps": 6, "checkpoint_minutes": 0.0, **settings})  # type: ignore[arg-type]
        return Trainer(folder, plan, task, Accelerator(cpu=True), result="model")

    return run


@pytest.mark.parametrize(
    ("groups", "heads", "length", "chunk"),
    [(1, 6, 70, 32), (2, 4, 32, 32), (1, 3, 100, 16), (3, 3, 5, 8), (1, 1, 1, 4)],
)
def test_the_scan_and_its_gradients_equal_those_of_transformers(
    groups: int, heads: int, length: int, chunk: int
) -> None:
    torch.manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).float().requires_grad_()

    x, dt, d, bias = normal(2, length, heads, 8), normal(2, length, heads), normal(heads), normal(heads)
    b, c = normal(2, length, groups, 5), normal(2, length, groups, 5)
    a = (-3 * torch.rand(heads)).requires_grad_()
    inputs = (x, dt, a, b, c, d, bias)
    theirs = mamba2_chunk_scan(x, dt, a, b, c, 16, D=d, dt_bias=bias, dt_softplus=True)
    ours = chunk_scan(x, F.softplus(dt + bias), a, b, c, d, chunk)
    assert torch.allclose(ours, theirs, atol=3e-5)
    towards = torch.randn_like(theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, towards), torch.autograd.grad(theirs, inputs, towards), strict=True
    ):
        assert torch.allclose(mine, other, atol=1e-4 * float(other.abs().max()) + 1e-5)


def recurrent_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule, token by token (arXiv 2412.06464, equation 10)."""
    shared = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    state = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3])
    rows = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = beta[:, t, :, None] * (v[:, t] - held)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(rows, 1)


def delta_inputs(groups: int, heads: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, normalised keys, values, log decays from 0 to -3, and rates up to 1, that require gradients."""
    torch.manual_seed(length)
    q, k = torch.randn(2, 2, length, groups, 5, dtype=torch.float64)
    v, rates = torch.randn(2, length, heads, 7, dtype=torch.float64), torch.rand(2, 2, length, heads)
    values = (q, F.normalize(k, dim=-1), v, -3 * rates[0] ** 4, rates[1])
    return [x.to(dtype).requires_grad_() for x in values]


@pytest.mark.parametrize(
    ("groups", "heads", "length", "chunk"),
    [(1, 2, 70, 32), (2, 4, 32, 32), (3, 3, 100, 16), (2, 2, 65, 64), (1, 3, 5, 8), (1, 1, 1, 4)],
)
def test_the_chunked_delta_rule_and_its_gradients_equal_the_recurrence(
    groups: int, heads: int, length: int, chunk: int
) -> None:
    inputs = delta_inputs(groups, heads, length, torch.float64)
    theirs, ours = recurrent_delta(*inputs), chunk_delta(*inputs, chunk)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    towards = torch.randn_like(theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, towards), torch.autograd.grad(theirs, inputs, towards), strict=True
    ):
        assert torch.allclose(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [1, 63, 100])
def test_the_chunked_delta_rule_equals_that_of_transformers(length: int) -> None:
    q, k, v, g, beta = delta_inputs(2, 4, length, torch.float32)
    theirs, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta)
    assert torch.allclose(chunk_delta(q * q.shape[-1] ** -0.5, k, v, g, beta), theirs, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_fast_layers_equal_those_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    model = new_model(MODELS[kind]).train()
    tokens = torch.randint(3, 400, (2, 75))
    found = []
    before = modeling_bamba.mamba2_chunk_scan, modeling_qwen3_5.torch_chunk_gated_delta_rule
    for fast in (False, True):
        model.zero_grad()
        with fast_layers() if fast else nullcontext():
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        (hidden.square() * torch.arange(32)).sum().backward()
        found.append((hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert before == (modeling_bamba.mamba2_chunk_scan, modeling_qwen3_5.torch_chunk_gated_delta_rule)
    (theirs, slopes), (ours, own) = found
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert own.keys() == slopes.keys()
    for name, slope in slopes.items():
        assert torch.allclose(own[name], slope, atol=1e-4 * float(slope.abs().max())), name


@pytest.mark.parametrize(
    ("kind", "function"),
    [(MAMBA2, "mmspec.ssm.training.layers.chunk_scan"), (GATED_DELTANET, "mmspec.ssm.training.layers.chunk_delta")],
)
def test_every_recurrent_layer_runs_the_fast_scan(kind: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    scan = chunk_scan if kind == MAMBA2 else chunk_delta
    monkeypatch.setattr(function, lambda *args: calls.append(1) or scan(*args))
    text_loss(new_model(MODELS[kind]), collate([(np.arange(3, 40), 5)]))
    assert len(calls) == 2


@pytest.mark.parametrize("kind", MODELS)
def test_initial_step_sizes_are_spread_over_the_heads(kind: str) -> None:
    found = new_model(MODELS[kind]).modules()
    mixers = [module for module in found if isinstance(module, BambaMixer | Qwen3_5GatedDeltaNet)]
    assert len(mixers) == 2
    for mixer in mixers:
        steps = F.softplus(mixer.dt_bias)
        assert steps[0].item() == pytest.approx(STEP_SIZES[0], rel=1e-3)
        assert steps[-1].item() == pytest.approx(STEP_SIZES[1], rel=1e-3)


def test_the_tokenizer_round_trips_any_text_and_splits_digits(tokenizer) -> None:  # type: ignore[no-untyped-def]
    for text in ("Answer: 1207", "def f(x):\n    return 3", "Ünï 漢字 🎉", ""):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.tokenize("1207")[-4:] == list("1207")
    assert len(tokenizer) == 400


def test_labels_are_the_answer_to_the_chat_prompt(tokenizer) -> None:  # type: ignore[no-untyped-def]
    for kind in KINDS:
        one = example(3, "heldout", kind)
        ((ids, prompt),) = encode([one], tokenizer)
        chat = [{"role": "user", "content": one.prompt}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert tokenizer(asked).input_ids == ids[:prompt].tolist()
        whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": one.answer}], tokenize=False)
        assert tokenizer(whole).input_ids == ids.tolist()
        batch = collate([(ids, prompt)])
        labels = batch.labels[0][batch.labels[0] != IGNORE]
        assert tokenizer.decode(labels.tolist()) == f" {one.answer}</s>"
        at = (batch.labels[0] != IGNORE).nonzero()[:, 0]
        assert torch.equal(batch.tokens[0, at[1:]], labels[:-1])


def test_padding_changes_no_loss(tokenizer) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = new_model(SMALL)
    short, long = (encode([example(3, kind=kind)], tokenizer)[0] for kind in ("sums", "story"))
    alone = [text_loss(model, collate([row])) for row in (short, long)]
    labels = [int((collate([row]).labels != IGNORE).sum()) for row in (short, long)]
    together = text_loss(model, collate([short, long])).total * sum(labels)
    assert together.item() == pytest.approx(
        sum(n * one.total.item() for n, one in zip(labels, alone, strict=True)), 1e-4
    )


def test_the_curriculum_starts_with_calculations(start: Callable[..., Trainer]) -> None:
    sampler = start("curriculum").task.sampler
    for progress, kinds in ((0.0, {TEXT}), (FIRST_SHARE, {TEXT}), (MIXED_FROM, {MIXED}), (1.0, {MIXED})):
        pool = [example for _ in range(POOL) for example in sampler.next(progress)]
        assert {kind for kind, _ in pool} == kinds


@pytest.mark.long
@pytest.mark.parametrize("killed_at", [1, 4])
def test_a_resumed_run_equals_an_uninterrupted_one(start: Callable[..., Trainer], killed_at: int) -> None:
    whole = start("whole")
    whole.train()
    run = start("killed")

    def kill() -> bool:
        if run.step >= killed_at:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run.train(stop=kill)
    resumed = start("killed")
    assert resumed.step == killed_at
    resumed.train()
    for name, value in whole.task.network.state_dict().items():
        assert torch.equal(value, resumed.task.network.state_dict()[name]), name


@pytest.mark.long
def test_the_loss_falls_and_is_reported_for_each_kind(start: Callable[..., Trainer]) -> None:
    rows: list[dict] = []
    run = start("falls", steps=60, warmup=5, checkpoint_minutes=9.0)
    run.notify = rows.append
    run.train()
    first, last = (row for row in rows if row["event"] == "held-out")
    assert all(last[f"{kind} loss"] < first[f"{kind} loss"] for kind in KINDS)
    assert last["loss"] < 0.9 * first["loss"]
    assert (run.folder / CHECKPOINT).exists()
    assert len((run.folder / LOG).read_text().splitlines()) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "architecture", "size"),
    [
        ((), "BambaForCausalLM", 8.5e6),
        (("--recurrent", GATED_DELTANET, "--precision", "float32"), "Qwen3_5ForCausalLM", 3e6),
    ],
)
def test_the_command_builds_a_model_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], architecture: str, size: float
) -> None:
    monkeypatch.setattr("mmspec.ssm.training.task.TOKENIZER_EXAMPLES", 200)
    result = CliRunner().invoke(
        tiny_hybrid, ["--out", str(tmp_path), "--steps", "1", "--batch", "2", "--examples", "16", *options]
    )
    assert result.exit_code == 0, result.output
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.architectures == [architecture]
    assert (folder / "model.safetensors").stat().st_size < size
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tokenizer.chat_template
    assert json.loads((tmp_path / "settings.json").read_text())["examples"] == 16
