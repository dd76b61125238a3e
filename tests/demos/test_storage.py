"""Uploads on disk and their previews."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import time

import av
import numpy as np
import pytest
from PIL import Image

from mmspec.demos import storage
from mmspec.demos.chat_request import Upload
from mmspec.demos.storage import UploadFolder, temporary_folder
from mmspec.errors import UserError
from mmspec.vision.images import load_image
from mmspec.vision.video import load_video
from tests.demos.serving import write_video
from tests.process import ROOT

SIZE = 1 << 16  # minimum that each file counts


@pytest.fixture
def uploads(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/scene.png").write_bytes(bytes(10 * SIZE))
    made = UploadFolder(tmp_path, limit=3 * SIZE)
    made.exempt_existing()
    return made


def store(uploads, name, size=SIZE, age=0.0):
    """Store a file as gradio does, in a folder named by a hash of its content."""
    path = uploads.folder / f"sha-{name}" / name
    path.parent.mkdir()
    path.write_bytes(bytes(size))
    os.utime(path, (time() - age,) * 2)
    return path


def test_least_recently_used_uploads_are_evicted(uploads):
    old, older, new = store(uploads, "old", age=1000), store(uploads, "older", age=2000), store(uploads, "new")
    assert uploads.reserve(SIZE)
    assert not older.parent.exists()
    assert old.exists()
    assert uploads.reserve(SIZE)  # the first reservation is still held
    assert not old.exists()
    assert not uploads.reserve(SIZE)
    assert new.exists()
    uploads.release(SIZE)
    assert uploads.reserve(SIZE)
    assert (uploads.folder / "samples/scene.png").exists()


def test_uploads_in_use_are_not_evicted(uploads):
    used, unused = store(uploads, "used", 2 * SIZE, age=1000), store(uploads, "unused", age=500)
    uploads.touch(str(used))
    assert not uploads.reserve(2 * SIZE)
    assert used.exists()
    assert not unused.exists()
    assert uploads.reserve(SIZE)


def test_small_files_count_at_least_the_minimum(uploads):
    for number in range(3):
        store(uploads, str(number), size=1)
    assert not uploads.reserve(1)


def test_old_uploads_are_removed(uploads):
    old, new, broken = store(uploads, "old", age=100), store(uploads, "new"), uploads.folder / "tmp1"
    broken.write_bytes(b"an interrupted upload")
    os.utime(broken, (0, 0))
    uploads.remove_unused(age=50)
    assert [old.parent.exists(), new.exists(), broken.exists()] == [False, True, False]
    uploads.remove_unused(age=0)
    assert sorted(path.name for path in uploads.folder.rglob("*")) == ["samples", "scene.png"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("{folder}/sha/a.png", True),
        ("{folder}/sha/../b.png", True),
        ("{folder}/../a.png", False),
        ("{folder}/sha/../../../etc/hostname", False),
        ("{folder}-other/a.png", False),
        ("{folder}/link/hostname", False),
        ("/etc/hostname", False),
        ("a.png", False),
        ("https://example.org/a.png", False),
        ("{folder}/a\0.png", False),
        ("{folder}/loop", False),
    ],
)
def test_contains(uploads, path, expected):
    (uploads.folder / "link").symlink_to("/etc")
    (uploads.folder / "loop").symlink_to("/")
    assert uploads.contains(path.format(folder=uploads.folder)) is expected


def start_server(parent):
    """Start a process with a temporary folder; returns both."""
    script = (
        "from mmspec.demos.storage import temporary_folder\n"
        "with temporary_folder() as folder:\n    (folder / 'upload').touch(); print(folder, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, Path(process.stdout.readline().strip())


def test_only_folders_of_killed_servers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stranger = tmp_path / "mmspec-demo-elsewhere"
    (tmp_path / "elsewhere").mkdir()
    stranger.symlink_to(tmp_path / "elsewhere")
    (living, its), (killed, stale) = start_server(tmp_path), start_server(tmp_path)
    with living, killed:
        killed.kill()
        killed.wait()
        assert (stale / "upload").exists()
        with temporary_folder() as folder:
            assert not stale.exists()
            assert (its / "upload").exists()
            assert stranger.exists()
            assert folder.parent == tmp_path
        assert not folder.exists()
        living.communicate("\n")
    assert not its.exists()


def test_folder_of_another_user_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "mmspec-demo-left"
    left.mkdir()
    user = os.geteuid()
    users = iter([user + 1, user])
    monkeypatch.setattr(os, "geteuid", lambda: next(users))
    with temporary_folder():
        assert left.exists()


def test_server_at_the_same_port_has_a_folder_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder(7860) as folder:
        (folder / "upload").touch()
        with temporary_folder(7860) as beside:
            assert beside != folder
    with temporary_folder(7860) as again:
        assert again == folder
        assert list(again.iterdir()) == []
        assert again.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("size", "small"), [((1200, 601), (400, 200)), ((31, 7), (30, 6)), ((900, 1), (400, 2))])
def test_image(tmp_path, size, small):
    path = str(tmp_path / "scan.tiff")
    Image.new("RGB", size, "navy").save(path)
    assert storage.preview_of(path) == path
    storage.write_preview(Upload(path, "scan.tiff"), "image")
    shown = storage.preview_of(path)
    assert storage.original_of(shown) == path
    with Image.open(shown) as image:
        assert (image.format, image.size) == ("PNG", small)
    assert load_image(shown).getpixel((0, 0)) == (0, 0, 128)
    assert len(list(tmp_path.iterdir())) == 2


def test_video(tmp_path):
    path = write_video(tmp_path / "clip.avi", "mpeg4", (800, 450))
    storage.write_preview(Upload(path, "clip.avi"), "video")
    shown = storage.preview_of(path)
    assert storage.original_of(shown) == path
    with av.open(shown) as container:
        (stream,) = container.streams
        assert (stream.codec_context.name, stream.width, stream.height) == ("h264", 400, 224)
        assert stream.pix_fmt == "yuv420p"
    clip = load_video(shown, frames=4)
    assert clip.duration == pytest.approx(2, abs=0.1)
    levels = [np.asarray(frame).mean() for frame in clip.frames]
    assert levels[0] < 20 and levels[1] < 20 and levels[2] > 235 and levels[3] > 235  # noqa: PT018


def test_broken_file_has_none(tmp_path):
    (tmp_path / "a.tiff").write_bytes(b"II*\x00broken")
    with pytest.raises(UserError, match=r"^a\.tiff: expected"):
        storage.write_preview(Upload(str(tmp_path / "a.tiff"), "a.tiff"), "image")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tiff"]
