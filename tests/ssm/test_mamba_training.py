"""Distillation of the mamba drafter: KL divergence against a plain loop, and `mmspec train mamba` on a tiny target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

pytest.importorskip("accelerate")

import mmspec
from mmspec.cli.commands import train as commands
from mmspec.drafters.registry import make_drafter
from mmspec.errors import UserError
from mmspec.ssm.drafters.mamba import Mamba, MambaConfig, MambaNetwork
from mmspec.ssm.training.mamba import forward_kl
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.data import as_text, read
from mmspec.training.features import Extractor, Features
from mmspec.training.options import RunOptions
from mmspec.training.plan import TEXT
from mmspec.training.tasks import DrafterSetup, DrafterTask
from mmspec.training.trainer import CURVE, DRAFTER, LOG
from mmspec.vision.cli.make_data import make_data
from tests.model_folders import save_text_model
from tests.tiny import shared_model
from tests.training import terminated_at

TEMPLATE = (
    "{% for message in messages %}{{ '<s>' if loop.first else '' }}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# ---------------------------------------------------------------------- objective


def network(**changes: Any) -> MambaNetwork:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "heads": 2, "head_dim": 8, "state": 4, "layers": 2, **changes}
    return MambaNetwork(MambaConfig(101, **shape))


def features(lengths: list[int], answers: list[list[int]], seed: int = 0) -> Features:
    """Random sequences; `answers` names each row's answer positions. Padding is filled with NaN."""
    g = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    tokens = torch.randint(0, 101, (len(lengths), longest), generator=g)
    hidden = torch.randn(len(lengths), longest, 48, generator=g)
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    hidden = hidden.masked_fill(~keep[..., None], torch.nan)
    answer = torch.zeros_like(keep)
    for row, places in enumerate(answers):
        answer[row, places] = True
    return Features(tokens, hidden, hidden, torch.zeros_like(keep), answer, keep)


def row(batch: Features, index: int, length: int) -> Features:
    cut = {name: value[index : index + 1, :length] for name, value in vars(batch).items() if value is not None}
    return replace(batch, **cut)


LENGTHS, ANSWERS = [9, 5, 12], [[3, 4, 5, 8], [4], [2, 3, 7, 8, 9, 10, 11]]
PLACES = [(0, 3), (0, 4), (2, 2), *((2, at) for at in (7, 8, 9, 10))]


@pytest.mark.parametrize("ids", [None, [3, 7, 50, 51, 99]])
def test_the_divergence_equals_a_plain_loop(ids: list[int] | None) -> None:
    target, student, batch = TransformersTarget(shared_model("llama")), network(), features(LENGTHS, ANSWERS)
    draft_ids = None if ids is None else torch.tensor(ids)
    losses = forward_kl(student, target, batch, draft_ids)
    vocabulary = list(range(101)) if ids is None else ids
    total, agreed, right = 0.0, 0, 0
    for index, at in PLACES:
        hidden = student(batch.tokens[index : index + 1, : at + 1])[0][0, -1]
        guess = torch.stack([hidden @ student.embed.weight[token] for token in vocabulary])
        logits = target.head(batch.hidden[index, at])
        q, p = guess - guess.exp().sum().log(), logits[vocabulary] - logits[vocabulary].exp().sum().log()
        total = total + sum(a.exp() * (a - b) for a, b in zip(p, q, strict=True))
        best = vocabulary[int(guess.argmax())]
        agreed += best == int(logits.argmax())
        right += best == int(batch.tokens[index, at + 1])
    expected = total / len(PLACES)
    torch.testing.assert_close(losses.total, expected, atol=1e-5, rtol=1e-4)
    assert losses.metrics == pytest.approx(
        {"kl": float(expected.detach()), "agreement": agreed / len(PLACES), "right": right / len(PLACES)}, rel=1e-4
    )
    gradients = [torch.autograd.grad(loss, list(student.parameters())) for loss in (losses.total, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_padding_does_not_matter() -> None:
    target, student, batch = TransformersTarget(shared_model("llama")), network(), features(LENGTHS, ANSWERS)
    together = torch.autograd.grad(forward_kl(student, target, batch).total, list(student.parameters()))
    alone = [torch.zeros_like(part) for part in together]
    for index, length in enumerate(LENGTHS):
        count = sum(place[0] == index for place in PLACES)
        part = forward_kl(student, target, row(batch, index, length)).total * count / len(PLACES)
        for sums, gradient in zip(alone, torch.autograd.grad(part, list(student.parameters())), strict=True):
            sums += gradient
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_batch_without_answers_teaches_nothing() -> None:
    losses = forward_kl(network(), TransformersTarget(shared_model("llama")), features([4, 3], [[2], []]))
    losses.total.backward()
    assert losses.metrics == {"kl": 0.0, "agreement": 0.0, "right": 0.0}


# ---------------------------------------------------------------------- command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random text target whose next token depends mostly on the last one: easy to learn."""
    folder = save_text_model(tmp_path_factory.mktemp("target"))
    target = LlamaForCausalLM.from_pretrained(folder)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.05
        layer.mlp.down_proj.weight.data *= 0.05
    said = torch.zeros(320, 1)
    said[2:40] = 4.0
    target.lm_head.weight.data *= said
    target.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def answered(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training data of `make-data` for a text target."""
    folder = tmp_path_factory.mktemp("conversations")
    lines = []
    for number in range(24):
        turns = [{"from": "human", "value": f"Count to {number * 7}."}, {"from": "gpt", "value": "No."}]
        turns += [{"from": "human", "value": "And on?"}] * (number % 3 == 0)
        lines.append(json.dumps({"id": str(number), "conversations": turns}))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    given = ["--target", model, "--prompts", str(folder / "prompts.jsonl"), "--out", str(folder)]
    result = CliRunner().invoke(make_data, [*given, "--batch", "5", "--max-new-tokens", "20"])
    assert result.exit_code == 0, result.output
    return folder / "data.jsonl"


def train(out: Path, model: str, *options: str, data: Path | None = None) -> str:
    small = ["--batch", "6", "--held-out", "4", "--prompts", "4", "--max-new-tokens", "16", "--warmup", "5"]
    small += ["--hidden-size", "32", "--heads", "2", "--head-dim", "16", "--state", "4"]
    given = ["--target", model, "--out", str(out), *(["--data", str(data)] if data else [])]
    result = CliRunner().invoke(commands, ["mamba", *given, *small, *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def test_make_data_generates_the_answers_of_a_text_target(model: str, answered: Path) -> None:
    pipe = mmspec.load(model, drafter=None)
    found = read(answered).conversations
    assert len(found) == 24
    assert sum(len(conversation.answers) for conversation in found) == 32
    for conversation in found[::8]:
        said = pipe.generate(as_text(conversation.messages[:1]), max_new_tokens=20, nodes=0)
        assert conversation.answers[0] == tuple(said.token_ids)


def test_evaluation_prompts_of_a_text_target_are_text(model: str, answered: Path) -> None:
    pipe, found = mmspec.load(model, drafter=None), read(answered).conversations
    setup, options = DrafterSetup(network(), forward_kl, Mamba), RunOptions(out=Path("unused"), prompts=2)
    task = DrafterTask(pipe, setup, {TEXT: found}, found[:2], Extractor(pipe), options)
    assert task._prompts == [[{"role": "user", "content": found[k].messages[0]["content"][0]["text"]}] for k in (0, 1)]


def test_a_drafter_learns_to_predict_its_target(model: str, answered: Path, tmp_path: Path) -> None:
    said = train(tmp_path, model, "--steps", "60", "--rate", "1e-2", "--top-k", "4", data=answered)
    assert "drafter written to" in said
    first, last = (row for row in rows(tmp_path) if row["event"] == "held-out")
    assert last["kl"] < 0.6 * first["kl"]
    assert last["agreement"] > first["agreement"] + 0.3
    assert last["mean_acceptance_length"] > first["mean_acceptance_length"] + 0.3
    assert (tmp_path / CURVE).exists()
    drafter = make_drafter(str(tmp_path / DRAFTER))
    assert (drafter.name, drafter.top_k, drafter.network.config.hidden_size) == ("mamba", 4, 32)
    pipe, plain = mmspec.load(model, drafter), mmspec.load(model, None)
    answers = [one.generate("Count to 7.", max_new_tokens=16, nodes=12) for one in (pipe, plain)]
    assert answers[0].token_ids == answers[1].token_ids


def test_a_resumed_run_is_bit_identical(model: str, answered: Path, tmp_path: Path) -> None:
    options = ["--steps", "7", "--prompts", "0", "--layers", "2", "--draft-vocabulary", "12"]
    train(tmp_path / "whole", model, *options, data=answered)
    with terminated_at(3):
        assert "stopped at step 4; run the same command again" in train(
            tmp_path / "parts", model, *options, data=answered
        )
    with pytest.raises(UserError, match=r"state = 4: expected the same to resume it, received 8"):
        train(tmp_path / "parts", model, *options, "--state", "8", data=answered)
    train(tmp_path / "parts", model, *options, data=answered)
    whole, parts = (load_file(tmp_path / name / DRAFTER / "model.safetensors") for name in ("whole", "parts"))
    assert len(whole["draft_ids"]) == 12
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name


def test_a_target_without_a_chat_template_or_data_is_refused(model: str, answered: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in --text or --data, received neither"):
        train(tmp_path / "a", model)
    bare = save_text_model(tmp_path / "bare")
    with pytest.raises(UserError, match="conversations need a chat template"):
        train(tmp_path / "b", str(bare), data=answered)


def test_a_drafter_of_another_vocabulary_is_refused(model: str, answered: Path, tmp_path: Path) -> None:
    train(tmp_path, model, "--steps", "1", "--prompts", "0", data=answered)
    other = save_text_model(tmp_path / "other", vocab=300)
    with pytest.raises(UserError, match=r"the drafter was trained for .*vocab_size 320.*: got .*vocab_size 300"):
        mmspec.load(str(other), str(tmp_path / DRAFTER))
