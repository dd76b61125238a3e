"""Worker process of ``mmspec.workers.Workers``: handles requests under limits on time and memory.

Requests arrive on standard input: a JSON line, then ``size`` bytes. Replies go to standard output: a JSON line, then
the bytes that the handler returned. This module and the handlers' must not import torch, so that workers start in a
fraction of a second and stay small.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mmspec.errors import UserError

Handler = Callable[[Any, bytes], tuple[dict[str, Any], Iterable[bytes]]]
"""Takes a request and its bytes; returns the reply, and the bytes that follow it."""


def serve(module: str, memory: int) -> None:
    """Handle requests until standard input is closed.

    Args:
        module: module whose function ``handle`` is the handler.
        memory: limit on allocated data (RLIMIT_DATA), in bytes.
    """
    handle: Handler = import_module(module).handle
    _set_limits(memory)
    with os.fdopen(os.dup(1), "wb") as replies:
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # silence libraries, and their messages before an abort
            os.dup2(null, descriptor)
        replies.write(b"ready\n")
        replies.flush()
        while line := sys.stdin.buffer.readline():
            header = json.loads(line)
            body = sys.stdin.buffer.read(header["size"])
            _set_alarm(header["seconds"])
            reply, parts = _handle(handle, header["request"], body)
            _set_alarm(0)
            replies.write(json.dumps(reply).encode() + b"\n")
            for part in parts:
                replies.write(part)
            replies.flush()


def _handle(handle: Handler, request: Any, body: bytes) -> tuple[dict[str, Any], Iterable[bytes]]:
    try:
        return handle(request, body)
    except UserError as error:
        if isinstance(error.__context__, MemoryError):
            return {"cause": "memory", "error": ""}, ()
        return {"error": str(error)}, ()
    except MemoryError:
        return {"cause": "memory", "error": ""}, ()
    except Exception as error:
        return {"cause": "exception", "error": f"{type(error).__name__}: {error}"}, ()


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
