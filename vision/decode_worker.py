"""Worker process of `mmspec.vision.decoding.Decoder`: decodes media and sends back RGB bytes.

Requests arrive on standard input, one JSON line each, followed by `size` bytes if the request has no `path`. Replies
go to standard output: a JSON line, then the RGB bytes of the images listed in its `sizes`. This module must not import
torch, so that workers start in a fraction of a second and stay small.
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
from mmspec.vision.images import load_image
from mmspec.vision.video import kind_of, load_video


def serve(memory: int) -> None:
    """Decode requests until standard input is closed.

    Args:
        memory: limit on allocated data (RLIMIT_DATA), in bytes.
    """
    _set_limits(memory)
    with os.fdopen(os.dup(1), "wb") as replies:
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # silence decoders, and libc's message before an abort
            os.dup2(null, descriptor)
        replies.write(b"ready\n")
        replies.flush()
        while line := sys.stdin.buffer.readline():
            request = json.loads(line)
            source = request["path"] if "path" in request else sys.stdin.buffer.read(request["size"])
            _set_alarm(request["seconds"] + _size(source) / 2**20)
            reply, images = _decode(request, source)
            _set_alarm(0)
            replies.write(json.dumps(reply | {"sizes": [image.size for image in images]}).encode() + b"\n")
            for image in images:
                replies.write(image.tobytes())
            replies.flush()


def _set_limits(memory: int) -> None:
    """Signal handlers and resource limits of this process."""
    if sys.platform == "win32":
        return
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole process group; the parent ends us
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # undo what the parent's settings passed on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        with suppress(OSError):  # the OOM killer picks this process first
            Path("/proc/self/oom_score_adj").write_text("1000")


def _set_alarm(seconds: float) -> None:
    """Arm the timer that kills this process; 0 disarms it."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM kills even while C code holds the GIL


def _size(source: str | bytes) -> int:
    if isinstance(source, bytes):
        return len(source)
    try:
        return os.stat(source).st_size
    except (OSError, ValueError):
        return 0


def _decode(request: dict[str, Any], source: str | bytes) -> tuple[dict[str, Any], list[Image.Image]]:
    """Decode a request's media. Returns the reply and the images whose bytes follow it."""
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
    images = {id(frame): frame for frame in video.frames}  # repeated frames are sent once
    order = list(images)
    reply = {"times": video.times, "duration": video.duration, "name": video.name}
    return {"video": reply, "frames": [order.index(id(frame)) for frame in video.frames]}, list(images.values())
