"""`mmspec train msd`, `flash`, `eagle3`, `dflash`, `medusa` and `kangaroo` on a tiny target."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlavaForConditionalGeneration

pytest.importorskip("accelerate")

import mmspec
from mmspec.cli.commands import train as commands
from mmspec.drafters.dflash import DFlash
from mmspec.drafters.eagle3 import Eagle3
from mmspec.drafters.hidden_state.layer import Rotary, rotary_frequencies
from mmspec.drafters.registry import make_drafter
from mmspec.errors import UserError
from mmspec.training.features import Features
from mmspec.training.trainer import CHECKPOINT, CURVE, DRAFTER, LOG
from mmspec.vision.drafters.msd import MSDConfig, MSDNetwork
from mmspec.vision.training.msd import fit_projection
from tests.eagle3 import EAGLE4, QWEN3_VL, cut, head_tensors, write_head
from tests.model_folders import save_llava
from tests.training import terminated_at

pytestmark = pytest.mark.long


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random target whose next token depends mostly on the last one: easy to learn."""
    folder = save_llava(tmp_path_factory.mktemp("target"))
    target = LlavaForConditionalGeneration.from_pretrained(folder)
    for layer in target.model.language_model.layers:
        layer.self_attn.o_proj.weight.data *= 0.05
        layer.mlp.down_proj.weight.data *= 0.05
    said = torch.zeros(320, 1)
    said[2:40] = 1.0
    target.lm_head.weight.data *= said
    target.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def files(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Conversations answered by the target: `text`, and `data` with an image each."""
    folder = tmp_path_factory.mktemp("conversations")
    pipe = mmspec.load(model, drafter=None)
    found = {}
    for kind in ("text", "data"):
        lines = []
        for number in range(12):
            record: dict[str, Any] = {"id": str(number)}
            prompt, image = f"Count to {number * 7}.", folder / f"{number}.png"
            if kind == "data":
                Image.new("RGB", (32, 32), (20 * number, 99, 255 - 20 * number)).save(image)
                record["image"] = image.name
            said = pipe.generate(prompt, images=[image] if kind == "data" else None, max_new_tokens=20, nodes=0)
            answer = {"from": "gpt", "value": said.text, "token_ids": said.token_ids}
            lines.append(json.dumps({**record, "conversations": [{"from": "human", "value": prompt}, answer]}))
        found[kind] = folder / f"{kind}.jsonl"
        found[kind].write_text("\n".join(lines))
    return found


@pytest.fixture
def train(model: str, files: dict[str, Path]) -> Callable[..., str]:
    """Runs the command in a folder; returns its output."""

    def call(out: Path, *options: str, command: str = "msd", **replaced: Path | None) -> str:
        chosen = {"--text": files["text"], "--data": files["data"], **{f"--{k}": v for k, v in replaced.items()}}
        given = [part for name, path in chosen.items() if path for part in (name, str(path))]
        small = ["--batch", "6", "--held-out", "4", "--prompts", "4", "--max-new-tokens", "16", "--warmup", "5"]
        result = CliRunner().invoke(commands, [command, "--target", model, "--out", str(out), *given, *small, *options])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return call


def saved(out: Path) -> dict[str, Tensor]:
    return load_file(out / DRAFTER / "model.safetensors")


def learned(model: str, folder: Path, loss: float = 0.8, gain: float = 0.3) -> tuple[Any, dict[str, Any]]:
    """The drafter of a run that has learned, which leaves an answer as it is, and its last evaluation."""
    first, last = (row for row in rows(folder) if row["event"] == "held-out")
    assert last["loss"] < loss * first["loss"]
    assert last["mean_acceptance_length"] > first["mean_acceptance_length"] + gain
    drafter = make_drafter(str(folder / DRAFTER))
    pipe, plain = mmspec.load(model, drafter), mmspec.load(model, None)
    answers = [one.generate("Count to 7.", max_new_tokens=16, nodes=12) for one in (pipe, plain)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.mean_acceptance_length > 1.3
    return drafter, last


def test_msd_learns_to_predict_its_target(model: str, train: Callable[..., str], tmp_path: Path) -> None:
    said = train(tmp_path, "--steps", "70", "--rate", "1e-2", "--tensorboard", "--top-k", "4", "--total-tokens", "12")
    drafter, _ = learned(model, tmp_path, loss=0.7)
    assert {row["stage"] for row in rows(tmp_path) if row["event"] == "train"} == {1, 2}
    assert "acceptance" in (tmp_path / CURVE).read_text()
    assert list((tmp_path / "tensorboard").glob("**/events.*"))
    assert "drafter written to" in said
    assert (drafter.top_k, drafter.depth, drafter.total_tokens) == (4, 6, 12)
    assert drafter.network.config.decoupled


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "latents", "slots", "levels"),
    [
        ([], 2, 12, 6),
        (["--latents", "3", "--slots", "1", "--passes", "2"], 3, 1, 2),
        (["--ratio", "2", "--slots", "2", "--passes", "2", "--glancing", "0.4"], 8, 2, 4),
        (["--rank", "12", "--loss", "lk", "--reads", "0,1", "--confidence", "--depth", "6"], 2, 12, 6),
    ],
)
def test_flash_learns_to_predict_its_target(
    options: list[str],
    latents: int,
    slots: int,
    levels: int,
    model: str,
    train: Callable[..., str],
    tmp_path: Path,
) -> None:
    train(tmp_path, "--steps", "60", "--rate", "1e-2", *options, command="flash")
    drafter, last = learned(model, tmp_path, gain=0.2)
    assert f"right_{levels}" in last
    config = drafter.network.config
    assert (drafter.name, config.latents, config.span, config.slots) == ("flash", latents, 16, slots)


def test_settings_keep_the_drafter_that_training_starts_from(train: Callable[..., str], tmp_path: Path) -> None:
    """Further layers add nothing at first, and a head of full rank is the target's."""
    shape = ["--draft-vocabulary", "10", "--slots", "6", "--depth", "6"]
    train(tmp_path / "first", "--steps", "30", "--rate", "1e-2", *shape, command="flash")
    options = ["--steps", "1", "--rate", "1e-12", "--depth", "6", "--slots", "6", "--rank", "32", "--reads", "1,0"]
    train(tmp_path / "more", *options, "--start", str(tmp_path / "first" / DRAFTER), command="flash")
    before, after = (
        next(row for row in rows(tmp_path / name)[::step] if row["event"] == "held-out")
        for name, step in (("first", -1), ("more", 1))
    )
    config = json.loads((tmp_path / "more" / DRAFTER / "config.json").read_text())["network"]
    assert (config["rank"], config["head"], config["reads"]) == (32, 10, [1, 0])
    for depth in range(1, 7):
        assert after[f"token_{depth}"] == pytest.approx(before[f"token_{depth}"], rel=1e-3)
    assert after["mean_acceptance_length"] == before["mean_acceptance_length"]


def test_a_low_rank_head_excludes_further_passes(train: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="passes must be 1 with rank: got 2"):
        train(tmp_path, "--steps", "1", "--rank", "4", "--passes", "2", command="flash")


EAGLE3 = ["--passes", "3", "--top-k", "4", "--depth", "4", "--total-tokens", "12"]


@pytest.mark.parametrize("objective", ["--loss kl", "--loss lk", "--parallel --keep 0.8"])
def test_a_head_learns_to_predict_its_target(
    model: str, train: Callable[..., str], tmp_path: Path, objective: str
) -> None:
    options = [*objective.split(), "--steps", "60", "--rate", "1e-2", "--draft-vocabulary", "40", *EAGLE3]
    said = train(tmp_path, *options, command="eagle3")
    drafter, last = learned(model, tmp_path)
    assert "right_3" in last
    assert "drafter written to" in said
    assert isinstance(drafter, Eagle3)
    assert (drafter.top_k, drafter.depth, drafter.total_tokens, len(drafter.draft_ids)) == (4, 4, 12, 40)
    assert (drafter.network.config.mask_token_id is not None) == ("parallel" in objective)


def test_layers_switches_and_a_cache(model: str, train: Callable[..., str], tmp_path: Path) -> None:
    options = ["--steps", "2", "--prompts", "0", "--layers", "2", "--reads", "1,0", "--outputs", *EAGLE3]
    options += ["--norm-before-residual", "--norm-before-fc"]
    train(tmp_path / "a", *options, command="eagle3")
    train(tmp_path / "b", *options, "--cache", str(tmp_path / "cache"), command="eagle3")
    for name, value in saved(tmp_path / "a").items():
        torch.testing.assert_close(value, saved(tmp_path / "b")[name], atol=1e-4, rtol=1e-3)
    drafter = make_drafter(str(tmp_path / "a" / DRAFTER))
    config = drafter.network.config
    assert (config.layers, config.reads, config.outputs, config.states, config.head) == (2, [1, 0], True, 2, 320)
    assert (config.norm_before_residual, config.norm_before_fc, config.norm_output) == (True, True, True)
    assert not config.fc_norm
    train(
        tmp_path / "on",
        "--steps",
        "1",
        "--rate",
        "1e-12",
        "--start",
        str(tmp_path / "a" / DRAFTER),
        *EAGLE3,
        command="eagle3",
    )
    for name, value in saved(tmp_path / "a").items():
        torch.testing.assert_close(saved(tmp_path / "on")[name], value, atol=1e-6, rtol=0)
    start = ["--start", str(tmp_path / "a" / DRAFTER), "--draft-vocabulary", "10"]
    with pytest.raises(UserError, match=r"expected lm_head.weight \(10, \d+\) to start from, received \(320, \d+\)"):
        train(tmp_path / "other", "--steps", "1", *start, *EAGLE3, command="eagle3")


def test_a_head_starts_as_one_with_and_without_parallel_levels(train: Callable[..., str], tmp_path: Path) -> None:
    masks, kept = [], []
    for name, *options in (("a",), ("b", "--parallel"), ("c",), ("d", "--sequential")):
        options += ["--start", str(tmp_path / chr(ord(name) - 1) / DRAFTER)] if name != "a" else []
        train(tmp_path / name, "--steps", "1", "--rate", "1e-12", "--prompts", "0", *options, command="eagle3")
        masks.append(make_drafter(str(tmp_path / name / DRAFTER)).network.config.mask_token_id)
        kept.append(saved(tmp_path / name))
    assert masks == [None, masks[1], masks[1], None]
    assert masks[1] is not None
    assert kept[1].keys() - kept[0].keys() == {"mask_hidden"}
    for before, after in pairwise(kept):
        for name in before.keys() & after.keys():
            torch.testing.assert_close(before[name], after[name], atol=1e-6, rtol=0)


def test_what_cannot_be_trained_is_refused(model: str, train: Callable[..., str], tmp_path: Path) -> None:
    refused = train(tmp_path / "a", "--reads", "2;3", command="eagle3")
    assert "'--reads': must be a list of whole numbers, as 2,16,29 on the command line: got '2;3'" in refused
    with pytest.raises(UserError, match="reads inputs of layers 1, 2, 9: the target has 2 layers"):
        train(tmp_path / "b", "--reads", "1,2,9", command="eagle3")
    target = mmspec.load(model, None).target
    config = cut(QWEN3_VL, vocab_size=320, target_model_type="llava", hidden_size=target.config.hidden_size)
    head = write_head(tmp_path / "head", config, head_tensors(config))
    with pytest.raises(UserError, match="expected a head with plain rotary positions, received M-RoPE"):
        train(tmp_path / "c", "--start", str(head), command="eagle3")
    config = cut(EAGLE4, vocab_size=320, draft_vocab_size=320, hidden_size=target.config.hidden_size)
    head = write_head(tmp_path / "eagle4", config, head_tensors(config, "C"))
    with pytest.raises(UserError, match="expected an EAGLE-3 head without a sliding window, received EAGLE-4's"):
        train(tmp_path / "d", "--start", str(head), command="eagle3")


DFLASH = ["--block-size", "5", "--anchors", "8", "--top-k", "4", "--total-tokens", "12"]


@pytest.mark.parametrize("start", [["--from-target"], []])
def test_blocks_learn_to_predict_their_target(
    model: str, train: Callable[..., str], tmp_path: Path, start: list[str]
) -> None:
    options = ["--steps", "60", "--rate", "1e-2", "--draft-vocabulary", "40", *start, *DFLASH]
    said = train(tmp_path, *options, command="dflash")
    drafter, last = learned(model, tmp_path)
    assert "right_4" in last
    assert "drafter written to" in said
    assert isinstance(drafter, DFlash)
    assert (drafter.top_k, drafter.depth, drafter.total_tokens, len(drafter.draft_ids)) == (4, 15, 12, 40)
    assert (drafter.network.config.block_size, drafter.network.config.target_layer_ids) == (5, [0, 1])


def test_blocks_start_as_the_targets_last_layers_or_as_another_drafter(
    model: str, train: Callable[..., str], tmp_path: Path
) -> None:
    still = ["--steps", "1", "--rate", "1e-12", "--prompts", "0", *DFLASH]
    changes = ["--from-target", "--layers", "1", "--reads", "0", "--mask-token-id", "7"]
    train(tmp_path / "a", *still, *changes, command="dflash")
    found, layer = saved(tmp_path / "a"), mmspec.load(model, None).model.get_decoder().layers[-1]
    attention, mlp = layer.self_attn, layer.mlp
    expected = {
        "q": attention.q_proj.weight,
        "kv": torch.cat([attention.k_proj.weight, attention.v_proj.weight]),
        "out": attention.o_proj.weight,
        "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": mlp.down_proj.weight,
        "input_norm": layer.input_layernorm.weight,
    }
    for name, weight in expected.items():
        torch.testing.assert_close(found[f"layers.0.{name}.weight"], weight.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found["fc.weight"], torch.eye(len(found["fc.weight"])), atol=1e-6, rtol=0)
    folder = str(tmp_path / "a" / DRAFTER)
    train(tmp_path / "b", *still, "--start", folder, "--cache", str(tmp_path / "cache"), command="dflash")
    for name, value in found.items():
        torch.testing.assert_close(saved(tmp_path / "b")[name], value, atol=1e-6, rtol=0)
    assert make_drafter(str(tmp_path / "b" / DRAFTER)).network.config.mask_token_id == 7
    with pytest.raises(UserError, match=r"expected fc.weight \(\d+, \d+\) to start from, received"):
        train(tmp_path / "c", *still, "--start", folder, "--reads", "0,1", command="dflash")
    with pytest.raises(UserError, match=r"--from-target needs layers like the drafter's: expected .*q_proj.weight"):
        train(tmp_path / "d", *still, "--from-target", "--heads", "1", "--kv-heads", "1", command="dflash")
    with pytest.raises(UserError, match="reads outputs of layers 0, 2: the target has 2 layers"):
        train(tmp_path / "e", *still, "--reads", "0,2", command="dflash")


def test_the_heads_of_dspark_are_trained_and_saved(model: str, train: Callable[..., str], tmp_path: Path) -> None:
    """And are what another run starts with."""
    heads = ["--markov-rank", "16", "--markov-type", "rnn", "--confidence", "markov", "--from-anchor", "--causal", "1"]
    train(
        tmp_path / "a",
        "--steps",
        "60",
        "--rate",
        "1e-2",
        "--draft-vocabulary",
        "40",
        "--loss",
        "tv",
        *heads,
        *DFLASH,
        command="dflash",
    )
    drafter, last = learned(model, tmp_path / "a")
    assert ("confidence_5" in last, "right_6" in last) == (True, False)  # five drafts of a block of five
    assert isinstance(drafter, DFlash)
    config = drafter.network.config
    assert (config.markov_type, config.markov_rank, config.causal) == ("rnn", 16, [1])
    assert (config.markov_inputs, config.markov_outputs) == (320, 40)
    again = ["--steps", "1", "--rate", "1e-12", "--prompts", "0", "--start", str(tmp_path / "a" / DRAFTER)]
    train(tmp_path / "b", *again, command="dflash")
    for name, value in saved(tmp_path / "a").items():
        torch.testing.assert_close(saved(tmp_path / "b")[name], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [["--layers", "2"], ["--grounded", "--shared-output"], ["--grounded", "--prefix"]])
def test_heads_of_medusa_and_hydra_learn_to_predict_their_target(
    options: list[str], model: str, train: Callable[..., str], tmp_path: Path
) -> None:
    tree = ["--heads", "3", "--top-k", "4", "--total-tokens", "12"]
    train(tmp_path, "--steps", "60", "--rate", "1e-2", "--draft-vocabulary", "40", *tree, *options, command="medusa")
    drafter, last = learned(model, tmp_path, loss=0.95)
    assert "right_3" in last
    config = drafter.network.config
    assert (drafter.name == "hydra") == config.grounded == ("--grounded" in options)
    assert (config.heads, config.layers, bool(config.prefix)) == (3, 1 + ("--layers" in options), "--prefix" in options)
    assert (config.head, len(drafter.draft_ids)) == (0 if "--shared-output" in options else 40, 40)


def test_kangaroo_learns_to_predict_its_target(model: str, train: Callable[..., str], tmp_path: Path) -> None:
    options = ["--exit-layer", "1", "--rate", "1e-2", "--draft-vocabulary", "40", "--top-k", "4"]
    train(tmp_path, "--steps", "60", *options, "--total-tokens", "12", command="kangaroo")
    drafter, _ = learned(model, tmp_path, loss=0.95)
    assert (drafter.name, len(drafter.draft_ids), drafter.network.config.exit_layer) == ("kangaroo", 40, 1)
    with pytest.raises(UserError, match=r"^an early exit must be after a layer before the last"):
        train(tmp_path / "late", "--steps", "1", "--exit-layer", "9", command="kangaroo")


def test_the_same_command_resumes_the_run(train: Callable[..., str], tmp_path: Path) -> None:
    options = ["--steps", "9", "--prompts", "0"]
    train(tmp_path / "whole", *options)
    with terminated_at(4):
        assert "stopped at step 5; run the same command again" in train(tmp_path / "parts", *options)
    with pytest.raises(UserError, match=r"noise = 0.1: expected the same to resume it, received 0.2"):
        train(tmp_path / "parts", *options, "--noise", "0.2")
    with pytest.raises(UserError, match=r"data = .*: expected the same"):
        train(tmp_path / "parts", *options, data=None)
    train(tmp_path / "parts", *options, "--checkpoint-minutes", "1")
    assert rows(tmp_path / "parts")[-1]["step"] == 9
    for name, value in saved(tmp_path / "whole").items():
        assert torch.equal(value, saved(tmp_path / "parts")[name]), name


def test_epochs_end_a_run(train: Callable[..., str], tmp_path: Path) -> None:
    train(tmp_path, "--epochs", "2", "--prompts", "0")
    assert rows(tmp_path)[-1]["step"] == 7  # 20 conversations are not held out; batches of 6


def test_cached_features_train_the_same_drafter(train: Callable[..., str], tmp_path: Path) -> None:
    options = ["--steps", "3", "--prompts", "0", "--no-decoupled", "--heads", "2", "--kv-heads", "1", "--mlp", "16"]
    assert "no --text: training on --data only, without stage 1" in train(tmp_path / "a", *options, text=None)
    train(tmp_path / "b", *options, "--cache", str(tmp_path / "cache"), text=None)
    assert list((tmp_path / "cache").glob("*.safetensors"))
    for name, value in saved(tmp_path / "a").items():
        torch.testing.assert_close(value, saved(tmp_path / "b")[name], atol=1e-4, rtol=1e-3)
    config = json.loads((tmp_path / "a" / DRAFTER / "config.json").read_text())["network"]
    assert (config["decoupled"], config["heads"], config["kv_heads"], config["mlp"]) == (False, 2, 1, 16)


def test_a_draft_vocabulary_is_saved(
    model: str, files: dict[str, Path], train: Callable[..., str], tmp_path: Path
) -> None:
    train(tmp_path, "--steps", "2", "--draft-vocabulary", "10")
    ids = saved(tmp_path)["draft_ids"].tolist()
    assert len(ids) == 10
    assert ids == sorted(set(ids))
    assert 2 in ids  # the end of a sequence
    answers = [
        json.loads(line)["conversations"][1]["token_ids"]
        for kind in files.values()
        for line in kind.read_text().splitlines()
    ]
    common = [token for token, _ in Counter(token for answer in answers for token in answer).most_common(5)]
    assert set(common) <= {*ids}
    pipe = mmspec.load(model, str(tmp_path / DRAFTER))
    assert pipe.generate("Count.", max_new_tokens=8, nodes=4).token_ids


def test_training_starts_from_a_drafter(train: Callable[..., str], tmp_path: Path) -> None:
    train(tmp_path / "msd", "--steps", "2", "--draft-vocabulary", "10", "--mlp", "16")
    begin = tmp_path / "msd" / DRAFTER
    # So small a rate leaves weights as they are.
    train(tmp_path / "on", "--steps", "1", "--rate", "1e-12", "--start", str(begin))
    for name, value in saved(tmp_path / "msd").items():
        torch.testing.assert_close(saved(tmp_path / "on")[name], value, atol=1e-6, rtol=0)
    options = ["--steps", "1", "--rate", "1e-12", "--start", str(begin), "--slots", "3", "--latents", "2"]
    options += ["--precision", "bfloat16"]
    train(tmp_path / "flash", *options, command="flash")
    network = json.loads((tmp_path / "flash" / DRAFTER / "config.json").read_text())["network"]
    assert (network["mlp"], network["slots"], network["latents"]) == (16, 3, 2)
    for name, value in saved(tmp_path / "msd").items():
        torch.testing.assert_close(saved(tmp_path / "flash")[name], value, atol=1e-6, rtol=0)
    with pytest.raises(UserError, match=r"expected gate_up.weight \(16, \d+\) to start from, received \(32, \d+\)"):
        train(tmp_path / "other", "--steps", "1", "--start", str(begin), "--mlp", "8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "1", "--minutes", "1"], "one of steps, minutes and epochs: received"),
        (["--held-out", "24"], "held-out must leave conversations to train on: there are 24, received 24"),
        (["--heads", "3"], "kv_heads must divide heads: got 2 for 3"),
        (["--head-dim", "7"], "head_dim must be even, as rotary positions turn pairs: got 7"),
        (["--device", "gpu"], "device must be auto, cpu or cuda: received 'gpu'"),
        (["--dtype", "bfloat16", "--precision", "float32"], "precision float32 needs a target in float32"),
    ],
)
def test_invalid_options_are_refused(
    train: Callable[..., str], tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, *options)


def test_missing_conversations_are_refused(train: Callable[..., str], files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in --text or --data, received neither"):
        train(tmp_path, text=None, data=None)
    with pytest.raises(UserError, match=r"--text takes conversations without media: 0 has some"):
        train(tmp_path, text=files["data"])


def _launched(options: list[str], *launcher: str) -> subprocess.Popen:
    command = [sys.executable, *launcher, "-m", "mmspec", "train", "msd", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_launched_by_accelerate_and_killed(model: str, files: dict[str, Path], tmp_path: Path) -> None:
    shared = ["--target", model, "--text", str(files["text"]), "--data", str(files["data"]), "--prompts", "0"]
    # One pass without noise: what a step computes is then the same however its examples are spread.
    shared += ["--steps", "40", "--batch", "5", "--passes", "1", "--noise", "0", "--checkpoint-minutes", "0"]
    for out in ("alone", "killed"):
        process = _launched([*shared, "--out", str(tmp_path / out)])
        if out == "killed":
            while process.poll() is None and not (tmp_path / out / CHECKPOINT).exists():
                time.sleep(0.01)
            process.kill()
        process.communicate()
    assert rows(tmp_path / "killed")[-1]["event"] == "train"
    two = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    for out, launcher in (("killed", []), ("both", two)):
        process = _launched([*shared, "--out", str(tmp_path / out)], *launcher)
        said = process.communicate()[1]
        assert process.returncode == 0, said
    for name, value in saved(tmp_path / "alone").items():
        assert torch.equal(value, saved(tmp_path / "killed")[name]), name
        torch.testing.assert_close(value, saved(tmp_path / "both")[name], atol=1e-4, rtol=1e-3)


def test_a_network_starts_as_the_best_linear_guess() -> None:
    """Where the next hidden state is linear in token embedding and hidden state, nothing is left to learn."""
    torch.manual_seed(0)
    network = MSDNetwork(MSDConfig(hidden_size=8, heads=2, kv_heads=1, head_dim=4, mlp=12, decoupled=False))
    step, shift = torch.randn(16, 8) / 4, torch.randn(8)
    batches = []
    for _ in range(3):
        embeds = torch.randn(5, 30, 8)
        hidden = [torch.randn(5, 8)]
        for place in range(1, 30):
            hidden.append(torch.cat([embeds[:, place], hidden[-1]], dim=-1) @ step + shift)
        answer = torch.zeros(5, 30, dtype=torch.bool)
        answer[:, 10:] = True
        states = torch.stack(hidden, dim=1)
        states[:, :9] = torch.randn(5, 9, 8)  # outside of answers
        batches.append(Features(answer.long(), states, embeds, torch.zeros_like(answer), answer, ~answer | answer))
    fit_projection(network, batches, ridge=1e-9)
    rotation = Rotary(rotary_frequencies(4, 10000.0))
    rotation.reserve(40, embeds)
    x = network.combine(embeds[:, 11:], states[:, 10:-1], None)
    with torch.no_grad():
        guess = network(x, rotation(slice(0, x.shape[1])), lambda q, k, v: torch.randn_like(q))
    torch.testing.assert_close(guess, states[:, 11:], atol=1e-4, rtol=1e-4)
    before = network.fc.weight.clone()
    fit_projection(network, [replace(batches[0], answer=torch.zeros_like(answer))])
    assert torch.equal(network.fc.weight, before)  # no answers


def test_a_fitted_network_starts_better(train: Callable[..., str], tmp_path: Path) -> None:
    losses = []
    for options in ((), ("--fit",)):
        folder = tmp_path / str(len(options))
        train(folder, "--steps", "1", "--prompts", "0", *options)
        losses.append(rows(folder)[0]["loss"])
    assert losses[1] < 0.8 * losses[0]
