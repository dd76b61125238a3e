"""Uploads on disk: limited in total, removed with age, and gone with the server, however that ends."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import time

import pytest

from demos.storage import Uploads, temporary_folder
from tests.process import ROOT

SIZE = 1 << 16  # what every file counts for at least


@pytest.fixture
def uploads(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/scene.png").write_bytes(bytes(10 * SIZE))
    made = Uploads(tmp_path, limit=3 * SIZE)
    made.keep_present()
    return made


def store(uploads, name, size=SIZE, age=0.0):
    """A file as the server stores it: in a folder named by its content."""
    path = uploads.folder / f"sha-{name}" / name
    path.parent.mkdir()
    path.write_bytes(bytes(size))
    os.utime(path, (time() - age,) * 2)
    return path


def test_the_least_recently_used_make_room(uploads):
    old, older, new = store(uploads, "old", age=1000), store(uploads, "older", age=2000), store(uploads, "new")
    assert uploads.reserve(SIZE)
    assert not older.parent.exists()
    assert old.exists()
    assert uploads.reserve(SIZE)  # beside the first one, which has not arrived yet
    assert not old.exists()
    assert not uploads.reserve(SIZE)
    assert new.exists()
    uploads.release(SIZE)
    assert uploads.reserve(SIZE)
    assert (uploads.folder / "samples/scene.png").exists()


def test_uploads_in_use_are_not_evicted(uploads):
    used, unused = store(uploads, "used", 2 * SIZE, age=1000), store(uploads, "unused", age=500)
    uploads.use(str(used))
    assert not uploads.reserve(2 * SIZE)
    assert used.exists()
    assert not unused.exists()
    assert uploads.reserve(SIZE)


def test_small_files_count_too(uploads):
    for number in range(3):
        store(uploads, str(number), size=1)
    assert not uploads.reserve(1)


def test_old_uploads_are_removed(uploads):
    old, new, broken = store(uploads, "old", age=100), store(uploads, "new"), uploads.folder / "tmp1"
    broken.write_bytes(b"an upload that was cut off")
    os.utime(broken, (0, 0))
    uploads.remove(age=50)
    assert [old.parent.exists(), new.exists(), broken.exists()] == [False, True, False]
    uploads.remove(age=0)
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
def test_paths_that_lead_out_of_the_folder(uploads, path, expected):
    (uploads.folder / "link").symlink_to("/etc")
    (uploads.folder / "loop").symlink_to("/")
    assert uploads.holds(path.format(folder=uploads.folder)) is expected


def server(parent):
    """A process that has such a folder, and the folder."""
    script = (
        "from demos.storage import temporary_folder\n"
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


def test_folders_of_killed_servers_are_removed_and_those_of_living_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stranger = tmp_path / "mmspec-demo-elsewhere"
    (tmp_path / "elsewhere").mkdir()
    stranger.symlink_to(tmp_path / "elsewhere")
    (living, its), (killed, left) = server(tmp_path), server(tmp_path)
    with living, killed:
        killed.kill()
        killed.wait()
        assert (left / "upload").exists()
        with temporary_folder() as folder:
            assert not left.exists()
            assert (its / "upload").exists()
            assert stranger.exists()
            assert folder.parent == tmp_path
        assert not folder.exists()
        living.communicate("\n")
    assert not its.exists()


def test_a_folder_of_another_user_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "mmspec-demo-left"
    left.mkdir()
    user = os.geteuid()
    users = iter([user + 1, user])
    monkeypatch.setattr(os, "geteuid", lambda: next(users))
    with temporary_folder():
        assert left.exists()
