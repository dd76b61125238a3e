"""Atomic file writes, JSON Lines logs, and the check that a run is resumed with its own settings."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmspec.errors import UserError, first_line

_MAKING = threading.Lock()
_REFUSALS = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)]
_UMASK = os.umask(0)
os.umask(_UMASK)


def cache_folder() -> Path:
    """Cache folder: ``$MMSPEC_CACHE``, else ``mmspec`` in the user's cache folder."""
    if folder := os.environ.get("MMSPEC_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmspec"


_CACHE = "; MMSPEC_CACHE names another one"


def make_folder(folder: Path, write: Callable[[Path], None], hint: str = _CACHE) -> None:
    """Makes a folder that appears whole; several threads and processes may make it at the same time.

    Args:
        folder: left alone if it exists.
        write: called with a temporary folder, which it fills.
        hint: end of the message if the parent cannot be written; by default that of a folder of the cache.

    Raises:
        UserError: its parent cannot be written, or the disk is full.
    """
    with _MAKING:
        if folder.is_dir():
            return
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(dir=folder.parent))
        except OSError as error:
            raise _cannot_make(folder, error, hint) from error
        try:
            write(part)
            for file in part.rglob("*"):
                if file.is_file():
                    flush(file)
            os.rename(part, folder)
        except Exception as error:
            if isinstance(error, OSError) and folder.is_dir():  # another process was faster
                return
            if any(text in str(error) for text in _REFUSALS):  # safetensors has errors of its own
                raise _cannot_make(folder, error, hint) from error
            raise
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _cannot_make(folder: Path, error: Exception, hint: str) -> UserError:
    what = "a cache folder" if hint == _CACHE else "a folder"
    return UserError(f"cannot make {folder}: expected {what} that can be written, received {first_line(error)}{hint}")


def flush(file: Path) -> None:
    """Wait until a file's contents are on the disk: after a power failure, a renamed file may otherwise be empty."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to `path` if the block succeeds. Creates parent folders.

    The file has the permissions of other new files: safetensors writes its own for the owner only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.chmod(part, 0o666 & ~_UMASK)
        os.replace(part, path)
    except BaseException:
        if part.is_file():
            part.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic(path) as part:
        part.write_text(text)


def append_row(log: Path, row: Mapping[str, Any]) -> None:
    """Appends a row to a JSON Lines log."""
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")


def truncate_log(log: Path, step: int) -> None:
    """Removes a log's incomplete last line and the rows after `step`, which a resumed run repeats."""
    lines = log.read_text().splitlines() if log.exists() else []
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    write_text(log, "".join(f"{line}\n" for line in kept))


def check_settings(folder: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Checks that a run in `folder` is resumed with the settings that it was started with.

    Settings missing from `saved`, which later versions have added, are not compared.

    Raises:
        UserError: naming the first setting that differs.
    """
    for name in saved:
        before, now = (json.dumps(values.get(name)) for values in (saved, settings))
        if before != now:
            raise UserError(
                f"{folder} holds a run with {name} = {before}: expected the same to resume it, received {now}; "
                "choose another --out for a new run"
            )
