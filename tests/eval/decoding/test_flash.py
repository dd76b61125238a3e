"""The ablation of FLASH: cells are trained once, measured alike, and told apart."""

import json
import subprocess

import pytest
from click.testing import CliRunner
from PIL import Image

import mmspec
from eval import flash
from eval.flash import MSD, Cell, grid, requests, train, trained
from mmspec.errors import UserError
from tests.standin import save_llava
from vision.distil.command import flash as train_flash


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
        said = pipe.generate(f"Picture {number}", images=[image], max_new_tokens=12)
        turns = [{"from": "human", "value": f"Picture {number}"}]
        turns.append({"from": "gpt", "value": said.text, "token_ids": said.token_ids})
        lines.append(json.dumps({"id": str(number), "image": image.name, "conversations": turns}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


@pytest.fixture
def calls(monkeypatch):
    """Trainings run in this process; what each was told."""
    said = []

    def run(command, **_):
        said.append(command)
        result = CliRunner().invoke(train_flash, command[4:])
        return subprocess.CompletedProcess(command, result.exit_code, "", result.output)

    monkeypatch.setattr(subprocess, "run", run)
    return said


def test_the_grid_has_msd_once_and_every_pair():
    cells = grid([1, 3], [4, 0], [0.0, 0.4])
    assert cells[0] == MSD
    assert len(set(cells)) == len(cells) == 5
    assert {(cell.slots, cell.latents) for cell in cells} == {(1, 0), (1, 4), (3, 0), (3, 4)}
    assert Cell(3, 0, 0.4) in cells
    assert grid([2], [4], [0.4]) == [MSD, Cell(2, 4, 0.4)]
    assert grid([2, 8], [0], [0.0, 0.4]) == [MSD, Cell(2, 0, 0.0), Cell(8, 0, 0.0), Cell(2, 0, 0.4)]


def test_requests_are_of_their_kinds():
    found = requests(3, 2, [4, 16])
    assert {name: len(asked) for name, asked in found.items()} == {
        "images": 3,
        "signs": 3,
        "several": 3,
        "video, 4 frames": 2,
        "video, 16 frames": 2,
    }
    assert all(len(one["images"]) >= 2 for one in found["several"])
    assert all(len(one["videos"][0].frames) == 16 for one in found["video, 16 frames"])
    assert list(requests(0, 1, [2])) == ["video, 2 frames"]


def test_cells_are_trained_once_and_measured(model, data, tmp_path, calls):
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
    config = trained(Cell(2, 2, 0.0), tmp_path / "cells").network.config
    assert (config.slots, config.latents) == (2, 2)


def test_a_cell_of_another_training_is_refused(model, data, tmp_path, calls):
    options = ["--target", model, "--data", str(data), "--batch", "2", "--held-out", "2", "--prompts", "0"]
    train(MSD, tmp_path, ["--steps", "1"], options)
    with pytest.raises(UserError, match=r"was trained otherwise: expected .*'2'.*, received .*'1'"):
        train(MSD, tmp_path, ["--steps", "2"], options)
    with pytest.raises(UserError, match=r"training slots-2-latents-all-glancing-0 ended early: .*no-such-file"):
        train(Cell(2, 0, 0.0), tmp_path, ["--steps", "2"], ["--data", "no-such-file"])
    assert not (tmp_path / "slots-2-latents-all-glancing-0" / "trained.json").exists()


def test_length_is_asked_for(tmp_path):
    result = CliRunner().invoke(flash.main, ["--out", str(tmp_path)])
    assert (result.exit_code, "give minutes or steps" in result.output) == (2, True)
