"""Atomic writes of files and folders, JSON Lines logs that are appended by whole lines, and checks of resumed settings.

Output is written to a temporary folder next to its final path and renamed when complete. The temporary folder is locked
while its process runs; the next writer in the same parent folder removes temporary folders of dead processes.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mmspec.errors import UserError, explained, first_line

_TEMPORARY, _LOCK, _SUMS = ".mmspec-", "lock", "sums.json"
_MAKING = threading.Lock()
_MAX_JSON = 1 << 24  # bytes
_REFUSALS = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)}
_UMASK = os.umask(0)
os.umask(_UMASK)


def cache_folder() -> Path:
    """Cache folder: ``$MMSPEC_CACHE``, else ``mmspec`` in the user's cache folder."""
    if folder := os.environ.get("MMSPEC_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmspec"


def readable_path(path: str) -> str:
    """A path for libraries that accept only UTF-8: for other paths a symbolic link, kept until the process ends."""
    plain = path.encode("utf-8", "replace").decode()
    if plain == path or not os.path.exists(path):
        return path
    link = os.path.join(tempfile.mkdtemp(prefix="mmspec-"), os.path.basename(plain))
    os.symlink(os.path.abspath(path), link)
    atexit.register(shutil.rmtree, os.path.dirname(link), ignore_errors=True)
    return link


def superseded() -> dict[Path, int]:
    """Cache folders left by earlier versions, with their size in bytes: converted GGUF models and partial output of
    killed conversions, except folders that a process is writing."""
    found = {}
    for folder in (path for kind in ("gguf", "completed") for path in cache_folder().glob(f"{kind}/*/*")):
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        converted = any(folder.glob("*.safetensors"))
        killed = folder.name.startswith((_TEMPORARY, "tmp"))
        if folder.is_dir() and (converted or killed) and not (killed and _is_locked(folder)):
            found[folder] = sum(path.stat().st_size for path in files)
    return found


def _is_locked(folder: Path) -> bool:
    if not (folder / _LOCK).exists():
        return False
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return False
    except (Timeout, FileNotFoundError) as error:
        return isinstance(error, Timeout)


_CACHE = "; MMSPEC_CACHE names another one"


def make_folder(folder: Path, write: Callable[[Path], Any], hint: str = _CACHE, new: bool = False) -> None:
    """Create a folder atomically; several threads and processes may create it concurrently.

    Args:
        folder: an existing folder is left unchanged.
        write: called with a temporary folder to fill.
        hint: end of the message if the parent cannot be written; by default the hint for cache folders.
        new: require that the folder does not exist and is not being written by another process.

    Raises:
        UserError: the parent cannot be written, the disk is full, or the folder is not ``new``.
    """
    with _MAKING:
        if folder.is_dir() and not new:
            return
        parts = folder.parent.glob(f"{_TEMPORARY}*") if new else ()
        if new and (folder.exists() or any((part / folder.name).exists() and _is_locked(part) for part in parts)):
            raise _not_new(folder)
        with temporary(folder, hint) as part:
            part.mkdir()
            write(part)
            settle(part)
            try:
                os.rename(part, folder)
            except OSError as error:
                if not folder.is_dir():
                    raise
                if new:
                    raise _not_new(folder) from error


def fill_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """Create a cache folder as ``make_folder`` does, again if a file in it is missing or damaged."""

    def write_all(part: Path) -> None:
        write(part)
        files = [path for path in part.rglob("*") if path.is_file() and path.name != _SUMS]
        sums = {str(path.relative_to(part)): zlib.crc32(path.read_bytes()) for path in files}
        (part / _SUMS).write_text(json.dumps(sums))

    if folder.is_dir():
        with suppress(OSError, ValueError, AttributeError):
            sums = json.loads((folder / _SUMS).read_text())
            if all(zlib.crc32((folder / name).read_bytes()) == found for name, found in sums.items()):
                return
        shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder, write_all)


def _not_new(folder: Path) -> UserError:
    found = "one that exists" if folder.exists() else "one that another process is writing"
    return UserError(f"{folder}: expected a new folder, received {found}")


@contextmanager
def temporary(path: Path, hint: str = "") -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder next to ``path``. Creates parent folders. Raises
    ``UserError``, whose message ends with ``hint``: the folder cannot be created, or the disk was full in the block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.absolute().parent)
        folder, lock = locked_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path, error, hint) from error
    try:
        yield folder / path.name
    except Exception as error:
        if refusal := _refusal(error):
            raise _cannot_write(path, refusal, hint) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def settle(path: Path) -> None:
    """Sync a file or folder to the disk, and set its permissions according to the umask.

    Without sync, a renamed file may be empty after a power failure. safetensors makes files readable by the owner only.
    """
    for one in [path, *path.rglob("*")]:
        if one.is_symlink():
            continue
        one.chmod((0o777 if one.is_dir() else 0o666) & ~_UMASK)
        if one.is_file():
            with one.open("rb") as opened:
                os.fsync(opened.fileno())


def locked_folder(parent: Path, prefix: str = _TEMPORARY, name: str = "") -> tuple[Path, FileLock]:
    """A new folder, locked by this process; its name is random if it is not given or taken."""
    folder = parent / f"{prefix}{name}" if name else parent  # which exists
    while True:
        try:
            folder.mkdir(0o700)
        except FileExistsError:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(Timeout, FileNotFoundError):  # another process removed the folder before it was locked
            lock = FileLock(folder / _LOCK, timeout=0)
            lock.acquire()
            return folder, lock


@lru_cache(maxsize=1024)  # once per process and folder, as a folder may have many files
def remove_leftovers(parent: Path, prefix: str = _TEMPORARY) -> None:
    """Remove such folders of killed processes."""
    for folder in parent.glob(f"{prefix}*"):
        if folder.is_symlink():
            continue
        with suppress(OSError), FileLock(folder / _LOCK, timeout=0):  # it may be locked, or belong to another user
            shutil.rmtree(folder, ignore_errors=True)


def _refusal(error: BaseException | None) -> BaseException | None:
    """The OS error of a failed write, such as a full disk, in the cause chain of a library's error."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _REFUSALS) or any(
            text in str(error) for text in _REFUSALS.values()
        ):
            return error
        error = error.__cause__ or error.__context__
    return None


def _cannot_write(path: Path, error: BaseException, hint: str = "") -> UserError:
    place = "a cache folder" if hint == _CACHE else "a place"
    return UserError(f"cannot write {path}: expected {place} that can be written, received {first_line(error)}{hint}")


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to ``path`` if the block succeeds. Creates parent folders.
    Raises ``UserError``: it cannot be written, or the disk is full."""
    with temporary(path) as part:
        yield part
        settle(part)
        os.replace(part, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def alone(file: Path, what: Path) -> Iterator[None]:
    """Lock the output ``what`` of a run, which continues or replaces it, against other processes; the lock ``file`` is
    removed at the end. Raises ``UserError``: another process has the lock, or the file cannot be written."""
    lock = FileLock(file, timeout=0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        message = f"{what}: expected an output of this run alone, received one that another process is writing"
        raise UserError(message) from None
    except OSError as error:
        raise _cannot_write(what, error) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def append_text(file: Path, text: str) -> None:
    """Append text to a file and sync to the disk; a failure leaves the file unchanged. Raises ``UserError``: the file
    cannot be written, or the disk is full."""
    try:
        with file.open("ab", buffering=0) as opened:
            size, left = opened.tell(), text.encode()
            try:
                while left:
                    left = left[opened.write(left) :]
                os.fsync(opened.fileno())
            except BaseException:
                opened.truncate(size)
                raise
    except OSError as error:
        raise _cannot_write(file, error) from error


def append_row(log: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a JSON Lines log."""
    append_text(log, json.dumps(row) + "\n")


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a UTF-8 file, with its line feed. Raises ``UserError``: the file cannot be
    read, or a line (named in the message) is not UTF-8."""
    with explained(f"{file}: expected a text file", OSError), file.open("rb") as opened:
        for number, line in enumerate(opened, start=1):
            try:
                text = line.decode("utf-8" if number > 1 else "utf-8-sig")
            except UnicodeDecodeError:
                raise UserError(f"{file}, line {number}: expected UTF-8, received {line[:60]!r}") from None
            yield number, text.replace("\r\n", "\n")


def read_rows(file: Path, cut: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of each non-blank line of a JSON Lines file. With ``cut``, the file is a log that may be
    missing, or may have an incomplete last line from a killed process, which is ignored. Raises ``UserError``: see
    ``read_lines``; or a line (named in the message) is not a JSON object."""
    if cut and not file.exists():
        return
    for number, line in read_lines(file):
        if line.strip() and (line.endswith("\n") or not cut):
            yield number, parse_object(line, f"{file}, line {number}")


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ``UserError``: the text is something else; the message starts with ``where``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, received {text.strip()[:60]!r}")
    return value


def read_json(file: Path, most: int = _MAX_JSON) -> dict[str, Any]:
    """Read a JSON object of at most ``most`` bytes; raises ``UserError`` for anything else."""
    with explained(f"{file}: expected a JSON object", OSError):
        if file.stat().st_size > most:
            raise UserError(f"{file}: expected a JSON object of at most {most} bytes, received a larger file")
    return parse_object("".join(text for _, text in read_lines(file)), str(file))


def truncate_log(log: Path, step: int) -> None:
    """Remove a log's incomplete last line and the rows after ``step``, which a resumed run repeats. Raises
    ``UserError``: a line is not a log row."""
    kept = []
    for number, row in read_rows(log, cut=True):
        if not isinstance(row.get("step"), int):
            raise UserError(f"{log}, line {number}: expected a row with a step, received none")
        if row["step"] <= step:
            kept.append(json.dumps(row) + "\n")
    write_text(log, "".join(kept))


def check_settings(folder: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that a run in ``folder`` is resumed with its original settings, without those that are not ``saved``, of
    later versions. Raises ``UserError``, which names the first setting that differs."""
    for name in saved:
        before, now = (json.dumps(values.get(name)) for values in (saved, settings))
        if before != now:
            raise UserError(
                f"{folder} holds a run with {name} = {before}: expected the same to resume it, received {now}; "
                "choose another --out for a new run"
            )
