"""Decode untrusted images and videos in worker processes, with time and memory limits.

A file on which a decoder crashes, hangs or runs out of memory kills only its worker and raises a `UserError`; the next
file gets a new worker. This protects against broken files. It is not a sandbox: workers run with the user's rights.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from threading import Semaphore
from typing import Any, Literal

from PIL import Image

from mmspec.errors import UserError
from mmspec.vision.media import printable
from mmspec.vision.video import Video

Cause = Literal["crash", "time", "memory", "exception"]

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from mmspec.vision.decode_worker import serve; serve(int(sys.argv[1]))"
)
# BLAS threads would reserve memory that counts towards the limit; decoding does not use them.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class DecodeError(UserError):
    """Raised when the decoder itself fails on a file.

    Attributes:
        cause: "crash" (the worker died), "time" or "memory" (limit exceeded), or "exception" (an unexpected exception).
    """

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


class Decoder:
    """Pool of worker processes that load images and videos.

    Workers are started on demand and reused. Thread-safe. Workers are stopped when the decoder is closed or garbage
    collected, and exit when the process that owns it ends.

    Args:
        workers: maximum number of files decoded concurrently; further calls block.
        seconds: wall-clock limit per file, plus one second per MiB of file size. Not enforced on Windows.
        memory: maximum bytes of data that a worker may allocate. Enforced on Linux only.
    """

    def __init__(self, *, workers: int = 2, seconds: float = 60.0, memory: int = 4 << 30) -> None:
        self.seconds = seconds
        self.memory = memory
        self._slots = Semaphore(workers)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self.close = weakref.finalize(self, _stop_all, self._workers)

    def load(
        self,
        source: str | os.PathLike[str] | bytes,
        kind: Literal["image", "video"] | None = None,
        *,
        name: str | None = None,
        **video: Any,
    ) -> Image.Image | Video:
        """Decode an image or a video in a worker; same results as `load_image` and `load_video`.

        Args:
            source: path, or a file's content.
            kind: None detects the kind from the content.
            name: name of the source in error messages.
            **video: options of `load_video`.

        Raises:
            UserError: as for `load_image` and `load_video`.
            DecodeError: the decoder crashed or exceeded a limit.
        """
        request = {"kind": kind, "name": name, "video": video, "seconds": self.seconds, "cwd": os.getcwd()}
        if isinstance(source, bytes):
            request["size"], body, label = len(source), source, printable(name or "<bytes>")
        else:
            request["path"], body, label = os.fspath(source), b"", printable(name or source)
        with self._slots:
            while True:
                worker = self._acquire()
                used = worker.used
                try:
                    return worker.decode(request, body)
                except _WorkerError as error:
                    # An earlier file may have corrupted a used worker's memory: retry in a fresh one before blaming
                    # this file.
                    if not used or error.cause == "time":
                        raise DecodeError(f"{label}: {self._describe(error)}", error.cause) from None
                finally:
                    self._release(worker)

    def _acquire(self) -> _Worker:
        with suppress(IndexError):
            while (worker := self._idle.pop()).process.poll() is not None:
                self._release(worker)
            return worker
        worker = _Worker(self.memory)
        self._workers.add(worker)
        return worker

    def _release(self, worker: _Worker) -> None:
        if worker.idle and worker.process.poll() is None:
            self._idle.append(worker)
        else:
            worker.stop()
            self._workers.discard(worker)

    def _describe(self, error: _WorkerError) -> str:
        if error.cause == "time":
            limit = f"within {self.seconds:g} s plus 1 s per MiB"
            return f"expected a file that is decoded {limit}, received one that takes longer"
        if error.cause == "memory":
            return f"expected a file that is decoded in {self.memory >> 20} MiB, received one that needs more"
        return f"expected readable media, received a file on which the decoder fails ({error.detail})"


class _WorkerError(Exception):
    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail


class _Worker:
    """One worker process.

    Attributes:
        idle: waiting for a request.
        used: has received a request before.
    """

    def __init__(self, memory: int) -> None:
        # multiprocessing's spawn would import the caller's main module, and torch with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(memory), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ENVIRONMENT,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout
        self.used = False
        self.idle = self._replies.readline() == b"ready\n"
        if not self.idle:
            self.stop()
            raise RuntimeError(f"the decoding worker did not start: exit status {self.process.returncode}")

    def decode(self, request: dict[str, Any], body: bytes) -> Image.Image | Video:
        self.idle, self.used = False, True
        try:
            self._requests.write(json.dumps(request).encode() + b"\n" + body)
            self._requests.flush()
            reply = json.loads(self._replies.readline())
            images = [Image.frombytes("RGB", tuple(size), self._read(3 * size[0] * size[1])) for size in reply["sizes"]]
        except (OSError, EOFError, ValueError):  # ValueError: incomplete or missing JSON line
            raise self._exit_error() from None
        self.idle = "cause" not in reply
        if "cause" in reply:
            raise _WorkerError(reply["cause"], printable(reply["error"]))
        if "error" in reply:
            raise UserError(reply["error"])
        if "video" not in reply:
            return images[0]
        return Video(frames=[images[index] for index in reply["frames"]], **reply["video"])

    def stop(self) -> None:
        self.process.kill()
        with suppress(OSError):  # unread request in the pipe
            self._requests.close()
        self._replies.close()
        self.process.wait()

    def _read(self, size: int) -> bytes:
        data = self._replies.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def _exit_error(self) -> _WorkerError:
        """Stop the worker; returns the error for its exit status."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.stop()
        status = self.process.returncode
        if status == -getattr(signal, "SIGALRM", 0):
            return _WorkerError("time")
        return _WorkerError("crash", signal.Signals(-status).name if status < 0 else f"exit status {status}")


def _stop_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.stop()
