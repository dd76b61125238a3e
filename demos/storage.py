"""Visitors' uploads on disk: a temporary folder that goes with the server, and a limit on what it holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from threading import Event, Lock, Thread
from time import time

try:
    import fcntl
except ImportError:  # Windows: folders of killed servers stay
    fcntl = None  # type: ignore[assignment]

_PREFIX = "mmspec-demo-"
_IN_USE = 300  # seconds after its last use in which an upload is not evicted: its question may wait in the queue
_SMALLEST = 1 << 16  # bytes that every file counts for, which limits the number of files


class Uploads:
    """The files below a folder, limited in total. Those that are there at the start are the server's own.

    Args:
        folder: where the server stores uploads.
        limit: bytes that uploads may take together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder.resolve()
        self.limit = limit
        self._own: frozenset[Path] = frozenset()
        self._reserved = 0
        self._lock = Lock()

    def keep_present(self) -> None:
        """Declare the files that are present now as the server's own: neither counted nor removed."""
        self._own = frozenset(path for path in self.folder.rglob("*") if path.is_file())

    def holds(self, path: str) -> bool:
        """Whether a path leads to somewhere below the folder."""
        try:
            return Path(path).resolve().is_relative_to(self.folder)
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a null byte
            return False

    def use(self, path: str) -> None:
        """Mark an upload as used now."""
        with suppress(OSError):
            os.utime(path)

    def reserve(self, size: int) -> bool:
        """Reserve bytes for an upload that is about to arrive, evicting uploads that were not used lately.

        Returns:
            Whether there is room. If so, ``release`` has to follow.
        """
        with self._lock:
            files = self._files()
            wanted = sum(taken for _, taken, _ in files) + self._reserved + size - self.limit
            for used, taken, path in files:
                if wanted <= 0 or used > time() - _IN_USE:
                    break
                self._remove(path)
                wanted -= taken
            if wanted > 0:
                return False
            self._reserved += size
            return True

    def release(self, size: int) -> None:
        """End a reservation: the upload has arrived, or failed."""
        with self._lock:
            self._reserved -= size

    def remove(self, age: float) -> None:
        """Remove uploads that were not used for ``age`` seconds."""
        for used, _, path in self._files():
            if used <= time() - age:
                self._remove(path)

    @contextmanager
    def removing(self, every: float, age: float) -> Iterator[None]:
        """Call ``remove(age)`` every so many seconds while the block runs."""
        ended = Event()

        def work() -> None:
            while not ended.wait(every):
                self.remove(age)

        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of each upload, least recently used first."""
        found = []
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # removed, or renamed at the end of its arrival
                if path not in self._own and path.is_file():
                    stat = path.stat()
                    found.append((stat.st_mtime, max(stat.st_size, _SMALLEST), path))
        return sorted(found)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if path.parent != self.folder:
            with suppress(OSError):  # it holds other files
                path.parent.rmdir()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is locked while this process lives and removed at the end. Those of killed servers go first."""
    parent = Path(gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        if (lock := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    folder, lock = _new_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _new_folder(parent: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _locked(folder)
        if lock is not None or fcntl is None:
            return folder, lock


def _locked(folder: Path) -> int | None:
    """A lock on a folder of this user; None where a living process holds it, or where there is no such folder.

    The lock is on the folder itself: it ends with the process however that ends, and no file of it can be left behind
    or fetched.
    """
    if fcntl is None:
        return None
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another server that starts may have removed a folder between its creation and its lock.
        if os.fstat(lock).st_uid == os.geteuid() and os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
