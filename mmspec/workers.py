"""Worker processes for untrusted input, with limits on time and memory.

If a library crashes, hangs or runs out of memory on a request, only this worker ends; the next request gets a new
worker. This protects against broken input. It is not a sandbox: workers run with the user's rights.

This module and handler modules must not import torch, so that workers start in a fraction of a second and stay small.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any, Literal, TypeVar

from mmspec.errors import UserError

Cause = Literal["crash", "time", "memory", "exception", "stop"]
Read = Callable[[int], bytes]
"""Reads the given number of bytes after a reply."""

Handler = Callable[[Any, bytes], tuple[dict[str, Any], Iterable[bytes]]]
"""Handles a request and its body; returns the reply and the bytes to send after it."""

T = TypeVar("T")


@contextmanager
def on_signals(handle: Callable[[int, Any], object], *numbers: int) -> Iterator[None]:
    """Handle signals during the block, in the main thread."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from mmspec.workers import serve; serve(sys.argv[1], int(sys.argv[2]))"
)
# BLAS threads would reserve memory that counts towards the limit; workers do not use them.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerError(Exception):
    """Raised when a worker fails on a request.

    Attributes:
        cause: "crash" (the worker died), "time" or "memory" (limit exceeded), "exception" (an unexpected exception), or
            "stop" (the request was stopped).
        detail: the signal, exit status or exception.
    """

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.cause, self.detail = cause, detail


class Cancellation:
    """Cancels a request from another thread, by ending its worker."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._worker: _Worker | None = None
        self.stopped = False

    def __call__(self) -> None:
        with self._lock:
            self.stopped = True
            if self._worker is not None:
                self._worker.process.kill()

    def attach(self, worker: _Worker | None) -> None:
        """Set the worker that handles the request. Raises ``WorkerError``: the request was stopped."""
        with self._lock:
            self._worker = worker
            if worker is not None and self.stopped:
                raise WorkerError("stop")


class Workers:
    """Pool of worker processes.

    Workers are started on demand and reused. Thread-safe. Workers are stopped when the pool is closed or garbage
    collected, and exit when the process that owns it ends.

    Args:
        module: module with the handler, a function ``handle``; see ``Handler``.
        workers: maximum number of requests at the same time; further calls block.
        memory: maximum bytes of data that a worker may allocate. Enforced on Linux only.
    """

    def __init__(self, module: str, *, workers: int, memory: int) -> None:
        self.memory = memory
        self._module = module
        self._slots = Semaphore(workers)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self.close = weakref.finalize(self, _stop_all, self._workers)

    def run(
        self,
        request: Any,
        body: bytes,
        seconds: float,
        read: Callable[[dict[str, Any], Read], T],
        stop: Cancellation | None = None,
    ) -> T:
        """Handle a request, JSON, in a worker within a wall-clock limit, which is not enforced on Windows. ``read``
        converts the reply, and the bytes that follow it, to the result. Raises the handler's ``UserError``, or
        ``WorkerError``: the worker failed, exceeded a limit or was stopped."""
        stop = stop or Cancellation()
        header = {"request": request, "size": len(body), "seconds": seconds}
        with self._slots:
            while True:
                worker = self._acquire()
                used = worker.used
                try:
                    stop.attach(worker)
                    return worker.run(header, body, read)
                except WorkerError as error:
                    if stop.stopped:
                        raise WorkerError("stop") from None
                    # An earlier request may have corrupted a used worker's memory: retry once in a fresh worker.
                    if not used or error.cause == "time":
                        raise
                finally:
                    stop.attach(None)
                    self._release(worker)

    def _acquire(self) -> _Worker:
        with suppress(IndexError):
            while (worker := self._idle.pop()).process.poll() is not None:
                self._release(worker)
            return worker
        worker = _Worker(self._module, self.memory)
        self._workers.add(worker)
        return worker

    def _release(self, worker: _Worker) -> None:
        if worker.idle and worker.process.poll() is None:
            self._idle.append(worker)
        else:
            worker.stop()
            self._workers.discard(worker)


class _Worker:
    """One worker process.

    Attributes:
        idle: waiting for a request.
        used: has received a request before.
    """

    def __init__(self, module: str, memory: int) -> None:
        # multiprocessing's spawn would import the caller's main module, and with it torch.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, module, str(memory), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ENVIRONMENT,
            process_group=0,  # keep a terminal's Ctrl-C from the worker, even during its start
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout
        self.used = False
        self.idle = self._replies.readline() == b"ready\n"
        if not self.idle:
            self.stop()
            raise RuntimeError(f"the worker of {module} did not start: exit status {self.process.returncode}")

    def run(self, header: dict[str, Any], body: bytes, read: Callable[[dict[str, Any], Read], T]) -> T:
        self.idle, self.used = False, True
        try:
            self._requests.write(json.dumps(header).encode() + b"\n" + body)
            self._requests.flush()
            reply = json.loads(self._replies.readline())
            result = None if "error" in reply else read(reply, self._read)
        except (OSError, EOFError, ValueError):  # ValueError: incomplete or missing JSON line
            raise self._exit_error() from None
        self.idle = "cause" not in reply
        if "cause" in reply:
            raise WorkerError(reply["cause"], reply["error"])
        if "error" in reply:
            raise UserError(reply["error"])
        return result  # type: ignore[return-value]

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

    def _exit_error(self) -> WorkerError:
        """Stop the worker; returns the error for its exit status."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.stop()
        status = self.process.returncode
        if status == -getattr(signal, "SIGALRM", 0):
            return WorkerError("time")
        return WorkerError("crash", signal.Signals(-status).name if status < 0 else f"exit status {status}")


def _stop_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.stop()


def serve(module: str, memory: int) -> None:
    """Handle requests in a worker process by a module's ``handle``, until standard input is closed.

    Requests arrive there: a JSON line, then ``size`` bytes. Replies go to standard output: a JSON line, then the bytes
    that the handler returned. ``memory`` is the limit on allocated data (RLIMIT_DATA), in bytes.
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
    except Exception as error:
        if isinstance(error, MemoryError) or (
            isinstance(error, UserError) and isinstance(error.__context__, MemoryError)
        ):
            return {"cause": "memory", "error": ""}, ()
        if isinstance(error, UserError):
            return {"error": str(error)}, ()
        return {"cause": "exception", "error": f"{type(error).__name__}: {error}"}, ()


def _set_limits(memory: int) -> None:
    """Set signal handlers and resource limits of this process."""
    if sys.platform == "win32":
        return
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # undo inherited settings of the parent
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
