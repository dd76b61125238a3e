"""Uploads on disk: a temporary folder of limited total size, and previews of formats that browsers do not show."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from threading import Lock
from time import time
from typing import Any

import av
from filelock import BaseFileLock, FileLock
from PIL import Image

from mmspec.demos.chat_request import MAX_VIDEO_SECONDS, Kind, decoder
from mmspec.files import atomic

_PREFIX = "mmspec-demo-"
_IN_USE_SECONDS = 300  # seconds after its last use before an upload may be evicted: its request may be queued
_MIN_COUNTED_BYTES = 1 << 16  # minimum bytes counted per file, to limit the number of files


class UploadFolder:
    """Folder of uploads with a limit on their total size, in bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder.resolve()
        self.limit = limit
        self._exempt: frozenset[Path] = frozenset()
        self._reserved = 0
        self._lock = Lock()

    def exempt_existing(self) -> None:
        """Exempt the files that exist now: they are neither counted nor removed."""
        self._exempt = frozenset(path for path in self.folder.rglob("*") if path.is_file())

    def contains(self, path: str) -> bool:
        """Whether a path, with links resolved, is inside the folder."""
        try:
            return Path(path).resolve().is_relative_to(self.folder)
        except (OSError, RuntimeError, ValueError):  # too long, a symlink loop, a null byte
            return False

    def reserve(self, size: int) -> bool:
        """Reserve space for an incoming upload, evicting the least recently used uploads; returns whether there is
        enough. If so, ``release`` must be called later."""
        with self._lock:
            files = self._files()
            wanted = sum(taken for _, taken, _ in files) + self._reserved + size - self.limit
            for used, taken, path in files:
                if wanted <= 0 or used > time() - _IN_USE_SECONDS:
                    break
                self._remove(path)
                wanted -= taken
            if wanted > 0:
                return False
            self._reserved += size
            return True

    def release(self, size: int) -> None:
        """Release a reservation after the upload was stored or failed."""
        with self._lock:
            self._reserved -= size

    def remove_unused(self, age: float) -> None:
        """Remove uploads that were not used for ``age`` seconds. ``os.utime`` marks an upload as used."""
        for used, _, path in self._files():
            if used <= time() - age:
                self._remove(path)

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of each upload, least recently used first."""
        files = []
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # removed or renamed concurrently
                if path not in self._exempt and path.is_file():
                    stat = path.stat()
                    files.append((stat.st_mtime, max(stat.st_size, _MIN_COUNTED_BYTES), path))
        return sorted(files)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if path.parent != self.folder:
            with suppress(OSError):  # not empty
                path.parent.rmdir()


@contextmanager
def temporary_folder(port: int = 0) -> Iterator[Path]:
    """Create a temporary folder, locked while in use and removed at the end; also removes folders of killed servers.

    A restarted server at the same port, unless 0, uses the same folder name, so that open pages find their files after
    uploading them again.
    """
    parent = Path(gettempdir())
    for stale in parent.glob(f"{_PREFIX}*"):
        if not stale.is_symlink() and (lock := _lock(stale)) is not None:
            shutil.rmtree(stale, ignore_errors=True)
            lock.release()
    folder, held = parent / f"{_PREFIX}{port}", None
    while held is None:  # another server removes the folder if it is not locked yet
        try:
            folder.mkdir(0o700)
        except FileExistsError:
            folder = Path(mkdtemp(prefix=_PREFIX, dir=parent))
        held = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        held.release()


def _lock(folder: Path) -> BaseFileLock | None:
    """Lock a folder; returns None if it is locked, missing or another user's."""
    lock = FileLock(folder / "lock", timeout=0)
    with suppress(OSError):
        lock.acquire()
        return lock
    return None


PREVIEW_SPACE = 1 << 20  # maximum bytes of a preview
_SUFFIXES: dict[Kind, str] = {"image": ".preview.png", "video": ".preview.mp4"}
_SIDE = 400  # pixels of the longer side, at most
_FRAMES = 48


def original_of(path: str) -> str:
    """The path of a preview's upload; other paths are returned unchanged."""
    for suffix in _SUFFIXES.values():
        path = path.removesuffix(suffix)
    return path


def write_preview(upload: str, kind: Kind) -> str:
    """Write the preview of an upload; returns its path. Raises ``UserError`` if the file cannot be decoded."""
    preview = Path(upload + _SUFFIXES[kind])
    options: dict[str, Any] = {"frames": _FRAMES, "max_duration": MAX_VIDEO_SECONDS} if kind == "video" else {}
    decoded: Any = decoder().load(upload, "image" if kind == "image" else "video", name=Path(upload).name, **options)
    with atomic(preview) as part:
        if kind == "image":
            _small(decoded).save(part)
        else:
            frames = [_small(frame) for frame in decoded.frames]
            rate = Fraction(len(frames) / max(decoded.duration, 0.1)).limit_denominator(1000)
            with av.open(str(part), "w", options={"movflags": "faststart"}) as container:
                stream = container.add_stream("libx264", rate=rate)
                stream.width, stream.height = frames[0].size
                stream.pix_fmt = "yuv420p"
                for frame in frames:
                    container.mux(stream.encode(av.VideoFrame.from_image(frame)))
                container.mux(stream.encode())
    return str(preview)


def _small(image: Image.Image) -> Image.Image:
    """Downscale to at most ``_SIDE`` pixels per side, even as H.264 requires."""
    copy = image.copy()
    copy.thumbnail((_SIDE, _SIDE))
    width, height = (max(2, side - side % 2) for side in copy.size)
    return copy.resize((width, height))
