"""Decode untrusted images and videos in worker processes, with time and memory limits; see ``mmspec.workers``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

from PIL import Image

from mmspec.errors import CutWarning, UserError
from mmspec.vision.images import load_image
from mmspec.vision.media import printable
from mmspec.vision.video import Video, kind_of, load_video
from mmspec.workers import Cancellation, Cause, Read, WorkerError, Workers


class DecodeError(UserError):
    """Raised when the decoder itself fails on a file. ``cause``: see ``WorkerError``."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


class MediaDecoder:
    """Pool of worker processes that load images and videos. Thread-safe; stopped when closed or garbage collected.

    Args:
        workers: maximum number of files decoded concurrently; further calls block.
        seconds: wall-clock limit per file, plus one second per MiB of file size. Not enforced on Windows.
        memory: maximum bytes of data that a worker may allocate. Enforced on Linux only.
    """

    def __init__(self, *, workers: int = 2, seconds: float = 60.0, memory: int = 4 << 30) -> None:
        self.seconds = seconds
        self.memory = memory
        self._workers = Workers("mmspec.vision.decoding", workers=workers, memory=memory)
        self.close = self._workers.close

    def load(
        self,
        source: str | os.PathLike[str] | bytes,
        kind: Literal["image", "video"] | None = None,
        *,
        name: str | None = None,
        stop: Cancellation | None = None,
        **video: Any,
    ) -> Image.Image | Video:
        """Decode an image or a video, a path or a file's content, in a worker; options, results and errors are as for
        ``load_image`` and ``load_video``.

        Args:
            kind: None detects the kind from the content.
            stop: stops the decoding, from another thread.

        Raises:
            DecodeError: the decoder crashed, exceeded a limit or was stopped.
        """
        request = {"kind": kind, "name": name, "video": video, "cwd": os.getcwd()}
        if isinstance(source, bytes):
            body, size, label = source, len(source), name or "<bytes>"
        else:
            request["path"], body, size, label = os.fspath(source), b"", 0, str(name or source)
            with suppress(OSError, ValueError):
                size = os.stat(source).st_size
        try:
            return self._workers.run(request, body, self.seconds + size / 2**20, _read, stop)
        except WorkerError as error:
            fails = f"a file on which the decoder fails ({printable(error.detail)})"
            limit = f"within {self.seconds:g} s plus 1 s per MiB"
            message = {
                "time": f"expected a file that is decoded {limit}, received one that takes longer",
                "memory": f"expected a file that is decoded in {self.memory >> 20} MiB, received one that needs more",
                "stop": "the decoding was stopped",
            }.get(error.cause, f"expected readable media, received {fails}")
            raise DecodeError(f"{printable(label)}: {message}", error.cause) from None


def _read(reply: dict[str, Any], read: Read) -> Image.Image | Video:
    images = [Image.frombytes("RGB", tuple(size), read(3 * size[0] * size[1])) for size in reply["sizes"]]
    if "video" not in reply:
        return images[0]
    for note in reply["notes"]:
        warnings.warn(note, CutWarning, stacklevel=2)
    return Video(frames=[images[index] for index in reply["frames"]], **reply["video"])


def handle(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], Iterator[bytes]]:
    """Decode a request's media, a file by its ``path`` or its content, in a worker process: the reply with the
    ``sizes`` of images, and their RGB bytes."""
    source, name = request.get("path", body), request["name"]
    os.chdir(request["cwd"])
    reply: dict[str, Any] = {}
    if (request["kind"] or kind_of(source, name=name)) == "image":
        images = [load_image(source, name=name)]
    else:
        with warnings.catch_warnings(record=True, action="always", category=CutWarning) as noted:
            video = load_video(source, name=name, **request["video"])
        unique = {id(frame): frame for frame in video.frames}  # repeated frames are sent once
        images, order = list(unique.values()), list(unique)
        reply["video"] = {field: getattr(video, field) for field in ("times", "duration", "name", "fps")}
        reply["frames"] = [order.index(id(frame)) for frame in video.frames]
        reply["notes"] = [str(one.message) for one in noted if one.category is CutWarning]
    return reply | {"sizes": [image.size for image in images]}, (image.tobytes() for image in images)
