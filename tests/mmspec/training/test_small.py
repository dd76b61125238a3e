"""The draft model's loss against a plain loop, its start, and `mmspec train small` on a tiny target."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

pytest.importorskip("accelerate")

import mmspec
from mmspec.cli.commands import train as commands
from mmspec.drafters.registry import make_drafter
from mmspec.errors import UserError
from mmspec.targets.merged_layers import MergedLayer, merge_layers
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.features import Features
from mmspec.training.small import _first_layers, distillation_loss
from mmspec.training.tasks import decoder_weights
from mmspec.training.trainer import DRAFTER, LOG
from tests.model_folders import save_llava, save_text_model
from tests.tiny import shared_model
from tests.training import terminated_at

# ---------------------------------------------------------------------- objective


def features() -> Features:
    """Two sequences of 9 and 5 tokens; the first has an image at its second and third position. Padding is NaN."""
    g = torch.Generator().manual_seed(0)
    keep = torch.arange(9) < torch.tensor([9, 5])[:, None]
    hidden = torch.randn(2, 9, 48, generator=g).masked_fill(~keep[..., None], torch.nan)
    answer, visual = torch.zeros_like(keep), torch.zeros_like(keep)
    answer[0, 4:8], answer[1, 2:5], visual[0, 1:3] = True, True, True
    tokens = torch.randint(3, 101, (2, 9), generator=g).masked_fill(visual, 5000)
    return Features(tokens, hidden, hidden, visual, answer, keep)


def shaken() -> torch.nn.Module:
    """Another model of the target's shape."""
    network = copy.deepcopy(shared_model("llama"))
    torch.manual_seed(3)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_the_loss_is_that_of_a_plain_loop_without_visual_positions(kind: Any) -> None:
    target, network, batch = TransformersTarget(shared_model("llama")), shaken(), features()
    output = distillation_loss(kind, network, target, batch)
    losses, right = [], []
    for row, at in [(0, 4), (0, 5), (0, 6), (1, 2), (1, 3)]:
        read = batch.tokens[row, : at + 1][~batch.visual[row, : at + 1]]
        scores = network(input_ids=read[None]).logits[0, -1].log_softmax(-1)
        with torch.no_grad():
            goal = shared_model("llama").lm_head(batch.hidden[row, at]).softmax(-1)
        accepted = torch.minimum(goal, scores.exp()).sum()
        share = (-3 * accepted.detach()).exp() if kind == "lk" else 1.0
        losses.append(share * -(goal * scores).sum() + (1 - share) * (1 - accepted))
        right.append(float(goal.argmax() == scores.argmax()))
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(output.total, expected, atol=1e-5, rtol=1e-4)
    assert output.metrics == pytest.approx({"token_1": float(expected.detach()), "right_1": sum(right) / 5}, rel=1e-4)
    gradients = [torch.autograd.grad(loss, list(network.parameters())) for loss in (output.total, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
    silent = replace(batch, answer=torch.zeros_like(batch.answer))
    assert float(distillation_loss(kind, network, target, silent).total) == 0


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
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def answered(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that the target has answered."""
    pipe, lines = mmspec.load(model, drafter=None), []
    for number in range(24):
        prompt = f"Count to {number * 7}."
        said = pipe.generate([{"role": "user", "content": prompt}], max_new_tokens=20)
        turns = [{"from": "human", "value": prompt}, {"from": "gpt", "value": said.text, "token_ids": said.token_ids}]
        lines.append(json.dumps({"id": str(number), "conversations": turns}))
    file = tmp_path_factory.mktemp("conversations") / "data.jsonl"
    file.write_text("\n".join(lines))
    return file


def train(out: Path, model: str, data: Path, *options: str) -> str:
    given = ["--target", model, "--out", str(out), "--text", str(data), "--batch", "6", "--held-out", "4"]
    given += ["--prompts", "4", "--max-new-tokens", "16", "--warmup", "5"]
    result = CliRunner().invoke(commands, ["small", *given, *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def evaluations(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    return [row for row in rows if row["event"] == "held-out"]


def test_a_draft_model_learns_to_predict_its_target(model: str, answered: Path, tmp_path: Path) -> None:
    train(tmp_path, model, answered, "--steps", "50", "--rate", "1e-2", "--layers", "1", "--hidden", "32")
    first, last = evaluations(tmp_path)
    assert last["loss"] < 0.8 * first["loss"]
    assert last["mean_acceptance_length"] > first["mean_acceptance_length"] + 0.3
    folder = tmp_path / DRAFTER
    written = AutoModelForCausalLM.from_pretrained(folder)
    shape = (written.config.hidden_size, written.config.num_hidden_layers, written.config.vocab_size)
    assert shape == (32, 1, 320)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    pipe, plain = mmspec.load(model, make_drafter(f"small:{folder}")), mmspec.load(model, None)
    answers = [one.generate("Count to 7.", max_new_tokens=16, nodes=12) for one in (pipe, plain)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.mean_acceptance_length > 1.3


def test_a_resumed_run_is_bit_identical(model: str, answered: Path, tmp_path: Path) -> None:
    options = ["--steps", "7", "--prompts", "0", "--hidden", "32", "--layers", "2"]
    train(tmp_path / "whole", model, answered, *options)
    with terminated_at(3):
        assert "stopped at step 4" in train(tmp_path / "parts", model, answered, *options)
    with pytest.raises(UserError, match=r"layers = 2: expected the same to resume it, received 3"):
        train(tmp_path / "parts", model, answered, *options, "--layers", "3")
    train(tmp_path / "parts", model, answered, *options)
    whole, parts = (load_file(tmp_path / name / DRAFTER / "model.safetensors") for name in ("whole", "parts"))
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name


STILL = ["--steps", "1", "--rate", "1e-12"]


def test_a_draft_model_of_the_targets_width_starts_with_its_embeddings(
    model: str, answered: Path, tmp_path: Path
) -> None:
    train(tmp_path, model, answered, *STILL, "--layers", "1", "--prompts", "0")
    theirs, ours = LlamaForCausalLM.from_pretrained(model), AutoModelForCausalLM.from_pretrained(tmp_path / DRAFTER)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(ours.state_dict()[name], theirs.state_dict()[name].bfloat16(), atol=1e-3, rtol=1e-2)


def test_a_draft_model_starts_as_the_targets_first_layers(model: str, answered: Path, tmp_path: Path) -> None:
    train(tmp_path / "all", model, answered, *STILL, "--from-target", "--layers", "2", "--prompts", "4")
    (first, _) = evaluations(tmp_path / "all")
    assert first["right_1"] == 1.0
    assert first["mean_acceptance_length"] > 4
    train(tmp_path / "one", model, answered, *STILL, "--from-target", "--layers", "1", "--prompts", "0")
    theirs, ours = (LlamaForCausalLM.from_pretrained(one).state_dict() for one in (model, tmp_path / "one" / DRAFTER))
    assert {name for name in theirs if ".layers.1." not in name} == set(ours)
    for name, weight in ours.items():
        torch.testing.assert_close(weight.float(), theirs[name], atol=1e-3, rtol=1e-2)
    for options in (["--layers", "3"], ["--hidden", "32"]):
        with pytest.raises(
            UserError,
            match=r"^--from-target takes the target's width and at most its layers, .* 'layers': 2}: received",
        ):
            train(tmp_path / "none", model, answered, *STILL, "--from-target", *options)


def test_a_target_with_images_has_a_draft_model_of_text(tmp_path: Path) -> None:
    """Its layers are those of the language model inside."""
    pipe = mmspec.load(str(save_llava(tmp_path)), None)
    ids = torch.randint(4, 300, (1, 9))
    with torch.no_grad():
        expected = pipe.model(input_ids=ids).logits
        torch.testing.assert_close(_first_layers(pipe, 2, None)(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_layers_that_were_merged_have_their_published_names(name: str) -> None:
    plain = copy.deepcopy(shared_model(name))
    for parameter in plain.parameters():
        if parameter.ndim == 1:  # biases are zero, weights of norms are one
            parameter.data += torch.rand_like(parameter)
    merged = copy.deepcopy(plain)
    merge_layers(merged.get_decoder())
    assert all(isinstance(layer, MergedLayer) for layer in merged.get_decoder().layers)
    found, weights = decoder_weights(SimpleNamespace(model=merged), [1]), plain.get_decoder().state_dict()
    expected = {key.replace("layers.1.", "layers.0."): one for key, one in weights.items() if "layers.0." not in key}
    assert set(found) == set(expected)
    for key, weight in found.items():
        torch.testing.assert_close(weight, expected[key])
