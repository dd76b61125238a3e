"""Tests of ``mmspec caption``: images, videos, other files; folders: resuming, skipped files, equal output on Ray."""

import importlib.util
import io
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("av")

import mmspec
from mmspec import plugins
from mmspec.cli import main
from mmspec.files import alone
from mmspec.vision.cli import caption as folders
from mmspec.vision.cli.caption import Captioner, caption_folder
from mmspec.vision.embedded import samples
from tests.commandline import assert_user_error, runner
from tests.media_files import cut_clip
from tests.model_folders import save_llava, save_text_model

IMAGE, VIDEO = str(samples() / "scene.png"), str(samples() / "clip.mp4")
NAMES = [f"{k}.png" for k in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("models") / "llava"))


@pytest.fixture
def run(capfd, monkeypatch, tmp_path):
    """Status, standard output and standard error of ``mmspec caption``."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    return runner(capfd, "caption")


def test_image(run, model):
    pipe = mmspec.load(model, drafter=None)
    expected = pipe.generate("Describe the image.", images=[IMAGE], max_new_tokens=12)
    status, out, err = run(IMAGE, "--model", model, "--max-new-tokens", "12", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["token_ids"] == expected.token_ids
    asked = pipe.generate("A red star", images=[IMAGE], max_new_tokens=12)
    assert asked.token_ids != expected.token_ids
    status, out, err = run(IMAGE, "--model", model, "--max-new-tokens", "12", "--prompt", "A red star")
    assert status == 0
    assert out.rstrip("\n") == asked.text.rstrip("\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("options", [{"frames": 2}, {"fps": 1.0}])
def test_video(run, model, options):
    pipe = mmspec.load(model, drafter=None)
    expected = pipe.generate("Describe the video.", videos=[VIDEO], max_new_tokens=6, **options)
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    status, out, err = run(VIDEO, "--model", model, "--max-new-tokens", "6", "--json", *flags)
    assert (status, err) == (0, "")
    assert json.loads(out)["token_ids"] == expected.token_ids


def test_standard_input(run, model, tmp_path, monkeypatch):
    (tmp_path / "-").mkdir()  # a folder of this name is ./-
    monkeypatch.chdir(tmp_path)
    pipe = mmspec.load(model, drafter=None)
    for source, kind in ((IMAGE, "image"), (VIDEO, "video")):
        expected = pipe.generate(f"Describe the {kind}.", **{f"{kind}s": [source]}, max_new_tokens=5)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(closed=False, buffer=io.BytesIO(Path(source).read_bytes())))
        status, out, err = run("-", "--model", model, "--max-new-tokens", "5", "--json")
        assert (status, err) == (0, "")
        assert json.loads(out)["token_ids"] == expected.token_ids
    for content, message in ((b"%PDF-1.7", "a PDF document; render"), (b"", "no bytes")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(closed=False, buffer=io.BytesIO(content)))
        expected_message = f"standard input: expected an image or a video, received {message}"
        assert_user_error(run("-", "--model", model), expected_message)
    monkeypatch.setattr(sys, "stdin", None)
    assert_user_error(
        run("-", "--model", model), "FILE is -: expected an image or a video on standard input, which is closed"
    )


def test_a_cut_video_is_described_with_a_note(run, model, tmp_path):
    (tmp_path / "cut.mkv").write_bytes(cut_clip())
    status, out, err = run(str(tmp_path / "cut.mkv"), "--model", model, "--max-new-tokens", "2")
    assert (status, bool(out)) == (0, True)
    assert f"note: {tmp_path / 'cut.mkv'} is cut short: frames are of the first " in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.png"], "none.png: expected an image or a video, received no such file"),
        (["a.pdf"], "a.pdf: expected an image or a video, received a PDF document; render its pages first"),
        (["a.png"], "a.png: expected an image or a video, received a PNG image"),
        ([IMAGE, "--frames", "0"], "--frames"),
        ([IMAGE, "--fps", "nan"], "--fps"),
        ([IMAGE, "--video-backend", "gstreamer"], "decord"),
        ([IMAGE, "--prompt", ""], "prompt must not be empty"),
        ([IMAGE, "--out", "x.jsonl"], "--out and --engine require a folder"),
        (["in"], "is a folder: expected --out FILE"),
        (["in", "--out", "x.jsonl", "--prompt", " "], "the prompt must not be empty"),
        (["in", "--out", "x.jsonl", "--temperature", "-1"], "'--temperature': -1.0 is not in the range x>=0."),
        (["in", "--out", "x.jsonl", "--compare"], "--compare and --json require a single file"),
        (["in", "--out", "x.jsonl"], "expected images or videos, received a folder without files"),
    ],
)
def test_arguments_that_are_refused(run, model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7\n")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert_user_error(run(*arguments, "--model", model), message)


def test_note_on_limits_of_an_embedded_model(run, tmp_path, monkeypatch):
    note = f"note: {plugins.limits('tiny-llava')}\n"
    (tmp_path / "in").mkdir()
    save_noise(tmp_path / "in" / "a.png", 0)
    options = ("--model", "tiny-llava", "--max-new-tokens", "2", "--nodes", "0", "--json")
    for path, expected in ((tmp_path / "in" / "a.png", note), (IMAGE, "")):
        assert run(str(path), *options)[2] == expected
    monkeypatch.setattr(folders, "Captioner", lambda _: lambda job: [{"file": name} for name in job["files"]])
    for number, folder in enumerate((samples(), tmp_path / "in")):
        status, _, err = run(str(folder), "--model", "tiny-llava", "--out", str(tmp_path / f"{number}.jsonl"))
        assert (status, err.count(note)) == (0, number)


def save_noise(path, seed):
    picture = np.random.default_rng(seed).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(picture).save(path)


@pytest.fixture
def pictures(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for seed, name in enumerate([*NAMES, "deep/x.jpg"]):
        save_noise(tmp_path / "in" / name, seed)
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


def test_every_file_gets_a_line_and_unreadable_ones_are_reported(pictures, model, tmp_path, capfd):
    out = tmp_path / "out" / "captions.jsonl"
    options = ["--model", model, "--max-new-tokens", "6", "--nodes", "4", "--drafter", "recycle", "--batch-size", "3"]
    assert main(["caption", str(pictures), "--out", str(out), *options]) == 3
    lines = lines_of(out)
    assert [line["file"] for line in lines] == sorted([*NAMES, "2a.txt", "3a.png", "deep/x.jpg"])
    skipped = {line["file"]: line["error"] for line in lines if "error" in line}
    assert set(skipped) == {"2a.txt", "3a.png"}
    lines = [line for line in lines if "error" not in line]
    printed = capfd.readouterr().err
    for name, error in skipped.items():
        assert f"skipped {name}: {error}" in printed
    assert f"6 captions in {out}, 2 files skipped" in printed
    pipe = mmspec.load(model, drafter=None)
    for line in lines:
        alone = pipe.generate("Describe the image.", images=[str(pictures / line["file"])], max_new_tokens=6)
        assert (line["text"], line["token_ids"]) == (alone.text, alone.token_ids)
        assert (line["prompt"], line["finish_reason"]) == ("Describe the image.", alone.finish_reason)
    assert os.listdir(out.parent) == ["captions.jsonl"]


def test_hidden_files_and_folders_are_skipped_at_every_depth_unless_named_themselves(tmp_path):
    names = ["a.png", "sub/b.png", ".hidden.png", ".hid/c.png", "sub/.hid/deep/d.png", "sub/.e.png"]
    for name in names:
        path = tmp_path / ".shots" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list(folders._find_files(tmp_path / ".shots", set())) == ["a.png", "sub/b.png"]


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """A folder with one image and entries that are no files; its subfolder "closed" cannot be listed."""
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for path in (folder / "closed", elsewhere):
        path.mkdir(parents=True)
        save_noise(path / "a.png", 1)
    (folder / "linked.png").symlink_to(elsewhere / "a.png")
    (folder / "broken.png").symlink_to(tmp_path / "gone.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "linked").symlink_to(elsewhere)
    os.mkfifo(folder / "pipe.png")
    scandir = os.scandir

    def listed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    return folder


def test_entries_that_are_no_files_get_error_lines(entries, model, tmp_path):
    out = tmp_path / "out.jsonl"
    assert caption_folder(settings(entries, model), out, 8) == (1, 5)
    given = "expected an image or a video, received"
    assert {line["file"]: line.get("error") for line in lines_of(out)} == {
        "broken.png": f"{given} a broken link",
        "closed": f"{given} a folder that cannot be read",
        "linked": f"{given} a link to a folder",
        "linked.png": None,
        "loop.png": f"{given} a broken link",
        "pipe.png": f"{given} a device or pipe",
    }
    save_noise(tmp_path / "gone.png", 2)  # where the broken link leads
    assert caption_folder(settings(entries, model), out, 8) == (2, 4)
    with pytest.raises(mmspec.UserError, match="closed: expected a folder of images or videos, received one"):
        caption_folder(settings(entries / "closed", model), tmp_path / "closed.jsonl", 8)


def test_interrupted_run_resumes(pictures, model, tmp_path, monkeypatch):
    sampling, whole, out = {"temperature": 1.0, "seed": 3}, tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
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


@pytest.fixture(scope="module")
def captioned(model, tmp_path_factory):
    """The captions of a folder of one image: the output file, and the command, which takes another folder and further
    options."""
    root = tmp_path_factory.mktemp("captioned")
    (root / "in").mkdir()
    save_noise(root / "in" / "a.png", 1)
    out = root / "captions.jsonl"
    options = {"model": model, "drafter": "none", "max-new-tokens": "3", "temperature": "1", "seed": "1"}

    def again(folder=root / "in", **changes):
        flags = [part for name, value in {**options, **changes}.items() for part in (f"--{name}", value)]
        return main(["caption", str(folder), "--out", str(out), *flags])

    assert again() == 0
    return out, again


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max-new-tokens", "4", "max_new_tokens = 3: expected the same to resume it, received 4"),
        ("top-p", "0.5", "top_p = null"),
        ("stop", "x", "stop = null"),
        ("seed", "2", "seed = 1"),
        ("batch-size", "2", "batch_size = 8"),
        ("prompt", "What?", 'prompt = null: expected the same to resume it, received "What?"'),
        ("fps", "2", "fps = null"),
        ("dtype", "bfloat16", 'dtype = "auto": expected the same to resume it, received "bfloat16"'),
        ("kv-cache-dtype", "int8", 'kv_cache_dtype = "auto"'),
        ("model", "tiny-llava", "model = "),
    ],
)
def test_changed_settings_raise_before_a_model_loads(captioned, monkeypatch, capfd, name, value, message):
    out, again = captioned
    before = out.read_bytes()
    monkeypatch.setattr(folders, "Captioner", lambda _: pytest.fail("a model was loaded"))
    assert again(**{name: value}) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {out} holds a run with ")
    assert message in error
    assert error.endswith("; choose another --out for a new run")
    assert out.read_bytes() == before


def test_settings_that_do_not_change_tokens_may_differ(captioned, monkeypatch):
    out, again = captioned
    before = out.read_bytes()
    monkeypatch.setattr(folders, "Captioner", lambda _: pytest.fail("a model was loaded"))
    assert again(drafter="ngram", nodes="2", device="cpu", threads="1") == 0
    assert out.read_bytes() == before


def test_different_folder_raises(captioned, tmp_path, capfd):
    save_noise(tmp_path / "a.png", 2)
    assert captioned[1](tmp_path) == 2
    assert 'holds a run with folder = "in": expected the same' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"file": "0.png", "settings": 3}', "a caption with the settings of its run"),
        (b'{"file": [], "settings": {}}', "a caption with the settings of its run"),
        (b"[1]", "a JSON object"),
    ],
)
def test_lines_without_settings_raise(pictures, model, tmp_path, line, expected):
    out = tmp_path / "out.jsonl"
    out.write_bytes(line + b"\n")
    with pytest.raises(mmspec.UserError, match=rf"out.jsonl, line 1: expected {expected}"):
        caption_folder(settings(pictures, model), out, 2)


def test_resume_captions_changed_and_new_files_and_keeps_lines_of_deleted_ones(pictures, model, tmp_path):
    out = tmp_path / "out.jsonl"
    caption_folder(settings(pictures, model), out, 2)
    before = {line["file"]: line for line in lines_of(out)}
    save_noise(pictures / "1.png", 7)
    save_noise(pictures / "3a.png", 8)  # was broken
    save_noise(pictures / "new.png", 9)
    (pictures / "4.png").unlink()
    (pictures / "2a.txt").unlink()
    assert caption_folder(settings(pictures, model), out, 2) == (8, 0)
    after = {line["file"]: line for line in lines_of(out)}
    assert set(after) == {*before, "new.png"} - {"2a.txt"}
    pipe = mmspec.load(model, drafter=None)
    for name in ("1.png", "3a.png", "new.png"):
        alone = pipe.generate("Describe the image.", images=[str(pictures / name)], max_new_tokens=6)
        assert after[name]["token_ids"] == alone.token_ids
    assert after["1.png"]["token_ids"] != before["1.png"]["token_ids"]
    assert [name for name in before if after.get(name) != before[name]] == ["1.png", "2a.txt", "3a.png"]


def save_clip(path, frames):
    """Save an animated GIF of 10 frames per second."""
    rng = np.random.default_rng(frames)
    pictures = [Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)) for _ in range(frames)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)


def test_only_the_file_exceeding_the_context_is_skipped(pictures, model, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    save_clip(pictures / "long.gif", 70)  # of 16 tokens each, in a context of 1024
    save_clip(pictures / "short.gif", 5)
    given = settings(pictures, model) | {"video": {"fps": 10}}
    reported = []
    assert caption_folder(given, out, 16, on_batch=lambda done, files, skipped: reported.extend(skipped)) == (7, 3)
    found = {line["file"]: line for line in lines_of(out)}
    assert "shorter than the model's context of 1024 tokens" in found["long.gif"]["error"]
    assert "long.gif" in [line["file"] for line in reported]
    pipe = mmspec.load(model, drafter=None)
    short = pipe.generate("Describe the video.", videos=[str(pictures / "short.gif")], fps=10, max_new_tokens=6)
    assert found["short.gif"]["token_ids"] == short.token_ids
    monkeypatch.setattr(folders, "Captioner", lambda _: pytest.fail("tried again"))
    assert caption_folder(given, out, 16) == (7, 3)


def test_folders_without_media_and_models_of_text_raise(tmp_path, model):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello")
    text = str(save_text_model(tmp_path / "text"))
    with pytest.raises(mmspec.UserError, match="expected a vision-language model, received one that reads text only"):
        caption_folder(settings(tmp_path / "in", text), tmp_path / "out.jsonl", 2)
    with pytest.raises(mmspec.UserError, match="expected at least one image or video, received 1 other files"):
        caption_folder(settings(tmp_path / "in", model), tmp_path / "out.jsonl", 2)


class Dying(Captioner):
    """Kills its process once, when it first gets a certain file."""

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
def test_ray_gives_equal_output_and_retries_after_a_killed_worker(pictures, model, tmp_path, monkeypatch):
    local, out = tmp_path / "local.jsonl", tmp_path / "ray.jsonl"
    caption_folder(settings(pictures, model), local, 2)
    monkeypatch.setattr(folders, "Captioner", Dying)
    assert caption_folder(settings(pictures, model), out, 2, engine="ray", workers=2) == (6, 2)
    assert (tmp_path / "died").exists()
    assert out.read_bytes() == local.read_bytes()


def test_an_output_has_one_run(captioned, capfd):
    out, again = captioned
    with alone(out.with_name(f".{out.name}.lock"), out):
        assert again() == 2
    assert f"{out}: expected an output of this run alone" in capfd.readouterr().err
    assert again() == 0
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name, "in"]
