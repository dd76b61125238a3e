"""Files and folders that are written whole, by one process or several, on disks that are full."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mmspec import files
from mmspec.errors import UserError
from tests.process import ROOT

WRITER = """
import sys, time
from pathlib import Path
from mmspec.cli.app import sigterm_exits
from mmspec.files import alone, atomic, make_folder
kind, path = sys.argv[1], Path(sys.argv[2])

def write(part):
    if part is not None:
        (part / "inside" if part.is_dir() else part).write_bytes(bytes(1 << 16))
    print("writing", flush=True)
    time.sleep(100)

with sigterm_exits():
    if kind == "folder":
        make_folder(path, write)
    with atomic(path) if kind == "file" else alone(path.parent / ".lock", path) as part:
        write(part)
"""
UNWRITTEN = "cannot write .*/file/out: expected a place that can be written, received [^;]*$"


@contextmanager
def writer(kind: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is in the middle of writing."""
    command = [sys.executable, "-c", WRITER, kind, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def write(kind: str, path: Path) -> None:
    """Write the path anew, as another run would: forget the folders whose leftovers were removed."""
    files.remove_leftovers.cache_clear()
    if kind == "file":
        files.write_text(path, "whole")
    else:
        files.make_folder(path, lambda part: (part / "inside").write_text("whole"))


def content(path: Path) -> str:
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"MMSPEC_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/mmspec"),
        ({"HOME": "/c"}, "/c/.cache/mmspec"),
    ],
)
def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name in ("MMSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert files.cache_folder() == Path(folder)


def run_alone(path: Path) -> None:
    with files.alone(path.parent / ".lock", path):
        pytest.fail("begun")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda path: files.make_folder(path, pytest.fail),
            ".* expected a cache folder .*; MMSPEC_CACHE names another one$",
        ),
        (lambda path: files.make_folder(path, pytest.fail, ""), UNWRITTEN),
        (lambda path: files.write_text(path, ""), UNWRITTEN),
        (lambda path: files.append_text(path, ""), UNWRITTEN),
        (run_alone, UNWRITTEN),
    ],
    ids=["folder of the cache", "folder", "file", "log", "run"],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, act: Callable[[Path], None], message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        act(tmp_path / "file" / "out")


def test_permissions_are_those_of_other_new_files_and_folders(tmp_path: Path) -> None:
    def fill(part: Path) -> None:
        (part / "more").mkdir()
        save_file({"weight": torch.zeros(1)}, part / "more" / "model.safetensors")

    (tmp_path / "usual").touch()
    (tmp_path / "usual folder").mkdir()
    with files.atomic(tmp_path / "model.safetensors") as part:
        save_file({"weight": torch.zeros(1)}, part)
    files.make_folder(tmp_path / "model", fill)
    mode = (tmp_path / "usual").stat().st_mode
    for name in ("model.safetensors", "model/more/model.safetensors"):
        assert (tmp_path / name).stat().st_mode == mode
    for name in ("model", "model/more"):
        assert (tmp_path / name).stat().st_mode == (tmp_path / "usual folder").stat().st_mode


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_run_that_is_killed_ended_or_alive(tmp_path: Path, kind: str) -> None:
    """The next run removes what a killed run left, SIGTERM removes it at once, and a living run keeps its own."""
    out = tmp_path / "out"
    with writer(kind, out) as ended:
        ended.send_signal(signal.SIGTERM)
        assert ended.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    with writer(kind, out) as running:
        write(kind, out)
        (theirs,) = set(tmp_path.iterdir()) - {out}
        assert (theirs / "out" / "inside" if kind == "folder" else theirs / "out").stat().st_size == 1 << 16
        assert content(out) == "whole"
        running.kill()
        running.wait()
    shutil.rmtree(out) if kind == "folder" else out.unlink()
    write(kind, out)
    assert list(tmp_path.iterdir()) == [out]


def test_a_new_folder_has_one_writer(tmp_path: Path) -> None:
    with (
        writer("folder", tmp_path / "out"),
        pytest.raises(UserError, match="out: expected a new folder, received one that another process is writing"),
    ):
        files.make_folder(tmp_path / "out", lambda part: pytest.fail("written twice"), new=True)
    files.make_folder(
        tmp_path / "out", lambda part: files.write_text(part / "inside", "whole"), new=True
    )  # the other was killed
    with pytest.raises(UserError, match="inside: expected a new folder, received one that exists"):
        files.make_folder(tmp_path / "out" / "inside", lambda part: pytest.fail("written"), new=True)


def test_of_two_writers_of_a_folder_the_faster_makes_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    slower = lambda part: files.write_text(out / "inside", "faster")  # noqa: E731
    files.make_folder(out, slower)
    files.make_folder(out, lambda part: pytest.fail("written again"))
    assert content(out) == "faster"
    for before in (lambda: None, lambda: shutil.rmtree(out)):
        before()
        with pytest.raises(UserError, match="out: expected a new folder, received one that exists"):
            files.make_folder(out, slower, new=True)
    assert list(tmp_path.iterdir()) == [out]


def test_an_output_has_one_run(tmp_path: Path) -> None:
    message = "out: expected an output of this run alone, received one that another process is writing"
    with writer("run", tmp_path / "out") as other:
        for _ in range(2):  # one that is refused leaves the lock to its owner
            with pytest.raises(UserError, match=message), files.alone(tmp_path / ".lock", tmp_path / "out"):
                pytest.fail("written twice")
    assert other.wait() == -signal.SIGKILL
    for folder in (tmp_path, tmp_path / "new" / "run"):
        with files.alone(folder / ".lock", tmp_path / "out"):
            assert (folder / ".lock").exists()
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_is_told_and_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files.write_text(tmp_path / "a.json", "before")
    files.append_text(tmp_path / "log.jsonl", '{"step": 1}\n')
    monkeypatch.setattr(os, "fsync", full)
    for act in (
        lambda: files.write_text(tmp_path / "a.json", "after"),
        lambda: files.append_text(tmp_path / "log.jsonl", '{"step": 2}\n'),
        lambda: files.make_folder(tmp_path / "a folder", lambda part: (part / "b").touch()),
    ):
        with pytest.raises(UserError, match=rf"cannot write {tmp_path}/.*, received .*No space left on device"):
            act()
    torch_saves = RuntimeError("unexpected pos 704 vs 598")
    torch_saves.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error, kind, message in (
        (torch_saves, UserError, r"cannot write .*/a\.pt: expected .*, received \[Errno 28\] No space left"),
        (RuntimeError("another"), RuntimeError, "another"),
    ):
        with pytest.raises(kind, match=message), files.atomic(tmp_path / "a.pt"):
            raise error
    assert (tmp_path / "a.json").read_text() == "before"
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "log.jsonl"}


def test_an_append_that_was_cut_short_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    files.append_text(log, "first\n")

    class Full(io.FileIO):
        """A file on a disk with room for three more bytes."""

        room = 3

        def write(self, data: Any) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= (written := super().write(data[: self.room]))
            return written

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=0: Full(path, mode))
    with pytest.raises(UserError, match="No space left"):
        files.append_text(log, "second\n")
    assert log.read_bytes() == b"first\n"


@pytest.mark.parametrize("line", [b"\xff{}", b"{", b"[" * 100_000, b"[]", b"3", b'"text"'])
def test_damaged_lines_are_named(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=r"^.*a\.jsonl, line 3: expected (a JSON object|UTF-8), received .*$"):
        list(files.read_rows(file))


def test_a_log_lacks_what_was_cut(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert list(files.read_rows(log, cut=True)) == []
    log.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"x": {"step": 1}')
    assert [row["step"] for _, row in files.read_rows(log, cut=True)] == [1, 2, 3]
    files.truncate_log(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'
    files.append_text(log, '{"other": 2}\n')
    with pytest.raises(UserError, match=r"log\.jsonl, line 3: expected a row with a step"):
        files.truncate_log(log, 2)


def test_lines_end_in_line_feeds_and_the_first_may_have_a_mark(tmp_path: Path) -> None:
    """Windows writes both; a mark elsewhere is text."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo\r\nthree")
    assert list(files.read_lines(tmp_path / "a.txt")) == [(1, "one\n"), (2, "\ufefftwo\n"), (3, "three")]


def test_a_json_object_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a":\n [1]}\n')
    most = file.stat().st_size
    assert files.read_json(file, most) == {"a": [1]}
    for text, received in (("[1]", r"'\[1\]'"), ('{"a": [1, 2, 3]}', "a larger file")):
        file.write_text(text)
        with pytest.raises(UserError, match=f"expected a JSON object.*, received {received}$"):
            files.read_json(file, most)


def test_a_run_is_resumed_with_its_own_settings(tmp_path: Path) -> None:
    files.check_settings(tmp_path, {"rate": 0.1}, {"rate": 0.1, "new": 3})
    message = r"holds a run with rate = 0.1: expected the same to resume it, received 0.2; choose another --out"
    with pytest.raises(UserError, match=message):
        files.check_settings(tmp_path, {"seed": 1, "rate": 0.1}, {"seed": 1, "rate": 0.2})
