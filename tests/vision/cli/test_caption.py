"""Tests of ``mmspec caption`` on images, videos and other files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("av")

import av

import mmspec
from mmspec import plugins
from mmspec.vision.embedded import samples
from tests.commandline import Run, assert_user_error, runner
from tests.media_files import cut_clip
from tests.model_folders import save_llava


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_llava(tmp_path_factory.mktemp("models") / "llava"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("media") / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    return str(path)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("media") / "noise.mp4"
    rng = np.random.default_rng(1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5)
        stream.width = stream.height = 64
        for _ in range(10):
            picture = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return str(path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Status, standard output and standard error of ``mmspec caption``."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    return runner(capfd, "caption")


def test_image(run: Run, model: str, image: str) -> None:
    pipe = mmspec.load(model, drafter=None)
    expected = pipe.generate("Describe the image.", images=[image], max_new_tokens=12)
    status, out, err = run(image, "--model", model, "--max-new-tokens", "12", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["token_ids"] == expected.token_ids
    asked = pipe.generate("A red star", images=[image], max_new_tokens=12)
    assert asked.token_ids != expected.token_ids
    status, out, err = run(image, "--model", model, "--max-new-tokens", "12", "--prompt", "A red star")
    assert status == 0
    assert out.rstrip("\n") == asked.text.rstrip("\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("options", [{"frames": 2}, {"fps": 1.0}])
def test_video(run: Run, model: str, video: str, options: dict[str, float]) -> None:
    pipe = mmspec.load(model, drafter=None)
    expected = pipe.generate("Describe the video.", videos=[video], max_new_tokens=6, **options)
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    status, out, err = run(video, "--model", model, "--max-new-tokens", "6", "--json", *flags)
    assert (status, err) == (0, "")
    assert json.loads(out)["token_ids"] == expected.token_ids


def test_standard_input(
    run: Run, model: str, image: str, video: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "-").mkdir()  # a folder of this name is ./-
    monkeypatch.chdir(tmp_path)
    pipe = mmspec.load(model, drafter=None)
    for source, kind in ((image, "image"), (video, "video")):
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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file"),
        (b"%PDF-1.7\n", "received a PDF document; render its pages first, e.g. pdftoppm -png"),
        (b"\x89PNG\r\n\x1a\n", "expected an image or a video, received a PNG image"),
    ],
)
def test_files_that_cannot_be_described(
    run: Run, model: str, tmp_path: Path, content: bytes | None, expected: str
) -> None:
    path = tmp_path / "file.png"
    if content is not None:
        path.write_bytes(content)
    assert_user_error(run(str(path), "--model", model), "file.png", expected)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--frames", "0"], "--frames"),
        (["--fps", "nan"], "--fps"),
        (["--video-backend", "gstreamer"], "decord"),
        (["--prompt", ""], "prompt must not be empty"),
    ],
)
def test_invalid_options_raise(run: Run, model: str, image: str, args: list[str], expected: str) -> None:
    assert_user_error(run(image, "--model", model, *args), expected)


def test_a_cut_video_is_described_with_a_note(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "cut.mkv").write_bytes(cut_clip())
    status, out, err = run(str(tmp_path / "cut.mkv"), "--model", model, "--max-new-tokens", "2")
    assert (status, bool(out)) == (0, True)
    assert f"note: {tmp_path / 'cut.mkv'} is cut short: frames are of the first " in err


def test_note_on_limits_of_an_embedded_model(run: Run, image: str) -> None:
    limits = plugins.limits("tiny-llava")
    options = ("--model", "tiny-llava", "--max-new-tokens", "2", "--nodes", "0", "--json")
    assert run(image, *options)[2] == f"note: {limits}\n"
    assert run(str(samples() / "scene.png"), *options)[2] == ""
