"""``mmspec caption FOLDER``: one line per file, the same whether stopped, batched by Ray or not."""

import importlib.util
import json
import os
import signal

import numpy as np
import pytest
from PIL import Image

import mmspec
from mmspec.cli import main
from tests.standin import save_llava
from vision import folder as folders
from vision.folder import Captioner, caption_folder

NAMES = [f"{k}.png" for k in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("models") / "llava"))


@pytest.fixture
def pictures(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in [*NAMES, "deep/x.jpg"]:
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(tmp_path / "in" / name)
    (tmp_path / "in" / "2a.txt").write_text("hello")
    (tmp_path / "in" / "3a.png").write_bytes((tmp_path / "in" / "3.png").read_bytes()[:200])
    (tmp_path / "in" / ".hidden.png").write_text("hello")
    return tmp_path / "in"


def settings(pictures, model, **keywords):
    loading = {"model": model, "drafter": "recycle", "device": "auto", "dtype": "auto"}
    keywords = {"max_new_tokens": 6, "nodes": 4, **keywords}
    return {"folder": str(pictures), "prompt": None, "video": {}, "loading": loading, "keywords": keywords}


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_readable_file_gets_a_line_and_the_others_are_told(pictures, model, tmp_path, capfd):
    out = tmp_path / "out" / "captions.jsonl"
    options = ["--model", model, "--max-new-tokens", "6", "--nodes", "4", "--drafter", "recycle", "--batch-size", "3"]
    assert main(["caption", str(pictures), "--out", str(out), *options]) == 0
    lines = lines_of(out)
    assert [line["file"] for line in lines] == [*NAMES, "deep/x.jpg"]
    told = capfd.readouterr().err
    assert "skipped 2a.txt: " in told
    assert "skipped 3a.png: " in told
    assert f"6 captions in {out}, 2 files skipped" in told
    pipe = mmspec.load(model, drafter=None)
    for line in lines:
        alone = pipe.generate("Describe the image.", images=[str(pictures / line["file"])], max_new_tokens=6)
        assert (line["text"], line["token_ids"]) == (alone.text.strip(), alone.token_ids)
        assert (line["prompt"], line["finish_reason"]) == ("Describe the image.", alone.finish_reason)
    assert os.listdir(out.parent) == ["captions.jsonl"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_stopped_run_goes_on(pictures, model, tmp_path, monkeypatch, sampling):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    caption_folder(settings(pictures, model, **sampling), whole, 2)
    call, done = Captioner.__call__, []

    def killed(self, job):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job)
        return call(self, job)

    monkeypatch.setattr(Captioner, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        caption_folder(settings(pictures, model, **sampling), out, 2)
    assert not out.exists()
    part = tmp_path / "out.jsonl.part"
    part.write_text(part.read_text()[:-9])
    done.clear()
    monkeypatch.setattr(Captioner, "__call__", lambda self, job: done.append(job) or call(self, job))
    assert caption_folder(settings(pictures, model, **sampling), out, 2) == (6, 2)
    assert out.read_bytes() == whole.read_bytes()
    assert done[0]["batch"] > 0
    assert not part.exists()


def test_what_is_done_is_not_done_again(pictures, model, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    caption_folder(settings(pictures, model), out, 2)
    before = out.read_bytes()
    monkeypatch.setattr(mmspec.Pipeline, "generate_batch", lambda *_, **__: pytest.fail("captioned"))
    assert caption_folder(settings(pictures, model), out, 2) == (6, 2)
    assert out.read_bytes() == before


def test_captions_by_another_model_or_prompt_are_not_mixed_in(pictures, model, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps({"file": "0.png", "model": "other", "prompt": "Describe the image."}) + "\n")
    with pytest.raises(mmspec.UserError, match=r"out.jsonl, line 1: expected captions by .* choose another --out"):
        caption_folder(settings(pictures, model), out, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "is a folder: expected --out FILE"),
        (["--out", "x.jsonl", "--compare"], "--compare and --json are for one file"),
        (["--out", "x.jsonl"], "expected images or videos, there are no files"),
    ],
)
def test_mistakes_are_told(tmp_path, options, message, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    assert main(["caption", "in", *options]) == 2
    assert message in capfd.readouterr().err


def test_options_of_folders_are_for_folders(pictures, capfd):
    assert main(["caption", str(pictures / "0.png"), "--out", "x.jsonl"]) == 2
    assert "--out and --engine are for folders" in capfd.readouterr().err


def test_a_folder_of_other_things_is_told(tmp_path, model):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello")
    with pytest.raises(mmspec.UserError, match="expected at least one image or video, received 1 other files"):
        caption_folder(settings(tmp_path / "in", model), tmp_path / "out.jsonl", 2)


class Dying(Captioner):
    """Kills its own process at the first sight of a file, once."""

    def __call__(self, job):
        mark = os.path.join(os.path.dirname(self.settings["folder"]), "died")
        if "deep/x.jpg" in job["files"] and not os.path.exists(mark):
            with open(mark, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(job)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install -e .[ray]")
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_same_and_redoes_what_a_killed_worker_had(pictures, model, tmp_path, monkeypatch):
    local, out = tmp_path / "local.jsonl", tmp_path / "ray.jsonl"
    caption_folder(settings(pictures, model), local, 2)
    monkeypatch.setattr(folders, "Captioner", Dying)
    assert caption_folder(settings(pictures, model), out, 2, engine="ray", workers=2) == (6, 2)
    assert (tmp_path / "died").exists()
    assert out.read_bytes() == local.read_bytes()
