"""The ablation of FLASH: every variant is trained once and measured on the same requests."""

import json
import subprocess

import pytest
from click.testing import CliRunner
from PIL import Image

import mmspec
from mmspec.errors import UserError
from mmspec.eval import flash
from mmspec.eval.decoding.flash_ablation import (
    MSD,
    Variant,
    ablation_requests,
    load_variant,
    train_variant,
    variant_grid,
)
from mmspec.vision.cli.drafters import flash as train_flash
from tests.model_folders import save_llava


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("standin")))


@pytest.fixture(scope="module")
def data(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("data")
    pipe = mmspec.load(model, None)
    lines = []
    for number in range(8):
        image = folder / f"{number}.png"
        Image.new("RGB", (32, 32), (30 * number, 99, 255)).save(image)
        answer = pipe.generate(f"Picture {number}", images=[image], max_new_tokens=12)
        turns = [{"from": "human", "value": f"Picture {number}"}]
        turns.append({"from": "gpt", "value": answer.text, "token_ids": answer.token_ids})
        lines.append(json.dumps({"id": str(number), "image": image.name, "conversations": turns}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


@pytest.fixture
def calls(monkeypatch):
    """Runs trainings in this process; returns their commands."""
    commands = []

    def run(command, **_):
        commands.append(command)
        result = CliRunner().invoke(train_flash, command[4:])
        return subprocess.CompletedProcess(command, result.exit_code, "", result.output)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_grid_has_msd_once_and_all_pairs():
    variants = variant_grid([1, 3], [4, 0], [0.0, 0.4])
    assert variants[0] == MSD
    assert len(set(variants)) == len(variants) == 5
    assert {(variant.slots, variant.latents) for variant in variants} == {(1, 0), (1, 4), (3, 0), (3, 4)}
    assert Variant(3, 0, 0.4) in variants
    assert variant_grid([2], [4], [0.4]) == [MSD, Variant(2, 4, 0.4)]
    assert variant_grid([2, 8], [0], [0.0, 0.4]) == [MSD, Variant(2, 0, 0.0), Variant(8, 0, 0.0), Variant(2, 0, 0.4)]


def test_requests_by_suite():
    found = ablation_requests(3, 2, [4, 16])
    assert {name: len(requests) for name, requests in found.items()} == {
        "images": 3,
        "signs": 3,
        "several": 3,
        "video, 4 frames": 2,
        "video, 16 frames": 2,
    }
    assert all(len(one["images"]) >= 2 for one in found["several"])
    assert all(len(one["videos"][0].frames) == 16 for one in found["video, 16 frames"])
    assert list(ablation_requests(0, 1, [2])) == ["video, 2 frames"]


def test_variants_are_trained_once_and_measured(model, data, tmp_path, calls):
    few = ["--batch", "2", "--held-out", "2", "--prompts", "0", "--passes", "1"]
    asked = ["--model", model, "--out", str(tmp_path / "cells"), "--steps", "2", "--slots", "2", "--latents", "2,all"]
    asked += ["--images", "1", "--videos", "1", "--frames", "2", "--rounds", "1", "--max-new-tokens", "8"]
    asked += ["--glancing", "0", "--train", f"--data {data} {' '.join(few)}", "--result", str(tmp_path / "result.json")]
    for _ in range(2):
        result = CliRunner().invoke(flash.main, asked)
        assert result.exit_code == 0, result.output
    assert len(calls) == 3  # MSD, and two of two slots
    content = json.loads((tmp_path / "result.json").read_text())
    assert len(content["rows"]) == 3 * 4
    for row in content["rows"]:
        assert row["equal"] == row["answers"] > 0
        assert row["mean_acceptance_length"] >= 1.0
        assert row["tokens_per_second"] > 0
        if (row["slots"], row["latents"]) == (1, 0):
            assert row["draft_cost_to_msd"] == row["ratio_msd"] == 1.0
    config = load_variant(Variant(2, 2, 0.0), tmp_path / "cells").network.config
    assert (config.slots, config.latents) == (2, 2)


def test_a_variant_trained_with_other_settings_is_refused(model, data, tmp_path, calls):
    options = ["--target", model, "--data", str(data), "--batch", "2", "--held-out", "2", "--prompts", "0"]
    train_variant(MSD, tmp_path, ["--steps", "1"], options)
    with pytest.raises(UserError, match=r"was trained with other settings: expected .*'2'.*, received .*'1'"):
        train_variant(MSD, tmp_path, ["--steps", "2"], options)
    with pytest.raises(UserError, match=r"training slots-2-latents-all-glancing-0 ended early: .*no-such-file"):
        train_variant(Variant(2, 0, 0.0), tmp_path, ["--steps", "2"], ["--data", "no-such-file"])
    assert not (tmp_path / "slots-2-latents-all-glancing-0" / "trained.json").exists()


def test_minutes_or_steps_are_required(tmp_path):
    result = CliRunner().invoke(flash.main, ["--out", str(tmp_path)])
    assert (result.exit_code, "give minutes or steps" in result.output) == (2, True)
