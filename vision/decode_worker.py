"""The process that decodes media for `vision.decoding.Decoder`.

It reads requests from standard input, a line of JSON each, followed by `size` bytes where the request has no `path`.
It writes replies to standard output: a line of JSON, then the RGB bytes of the images whose `sizes` it lists. It must
not import torch: workers start in a fraction of a second and stay small.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec.errors import UserError
from vision.images import load_image
from vision.video import kind_of, load_video


def serve(memory: int) -> None:
    """Answer requests until standard input ends.

    Args:
        memory: limit of data, in bytes.
    """
    _limit(memory)
    with os.fdopen(os.dup(1), "wb") as replies:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # what decoders print; also what libc prints before it aborts
            os.dup2(nowhere, descriptor)
        replies.write(b"ready\n")
        replies.flush()
        while line := sys.stdin.buffer.readline():
            request = json.loads(line)
            source = request["path"] if "path" in request else sys.stdin.buffer.read(request["size"])
            _alarm(request["seconds"] + _size(source) / 2**20)
            reply, images = _answer(request, source)
            _alarm(0)
            replies.write(json.dumps(reply | {"sizes": [image.size for image in images]}).encode() + b"\n")
            for image in images:
                replies.write(image.tobytes())
            replies.flush()


def _limit(memory: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent's end closes our input
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # what the parent ignores or blocks is inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        with suppress(OSError):  # where memory runs out, the kernel ends this process first
            Path("/proc/self/oom_score_adj").write_text("1000")


def _alarm(seconds: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its default action ends the process, whatever holds the GIL


def _size(source: str | bytes) -> int:
    if isinstance(source, bytes):
        return len(source)
    try:
        return os.stat(source).st_size
    except (OSError, ValueError):
        return 0


def _answer(request: dict[str, Any], source: str | bytes) -> tuple[dict[str, Any], list[Image.Image]]:
    """The reply and the images that follow it."""
    name = request["name"]
    try:
        os.chdir(request["cwd"])
        kind = request["kind"] or kind_of(source, name=name)
        if kind == "image":
            return {}, [load_image(source, name=name)]
        video = load_video(source, name=name, **request["video"])
    except UserError as error:
        if isinstance(error.__context__, MemoryError):
            return {"cause": "memory", "error": ""}, []
        return {"error": str(error)}, []
    except MemoryError:
        return {"cause": "memory", "error": ""}, []
    except Exception as error:
        return {"cause": "exception", "error": f"{type(error).__name__}: {error}"}, []
    images = {id(frame): frame for frame in video.frames}  # repeated frames share one image
    order = list(images)
    reply = {"times": video.times, "duration": video.duration, "name": video.name}
    return {"video": reply, "frames": [order.index(id(frame)) for frame in video.frames]}, list(images.values())
