"""Continuous-batching engine: a worker thread runs decode steps, and sequences join and leave between them."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import abc
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter as clock
from time import sleep
from typing import Any, ClassVar, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch

from mmspec.cache.prefix_cache import PrefixCache
from mmspec.core.target import KeepsStates, Target
from mmspec.engine.core import EngineCore
from mmspec.engine.policy import Speculation
from mmspec.engine.request import Request
from mmspec.engine.sequence import BatchKey, DecodeRequest, Sequence, Sink
from mmspec.engine.threads import TorchThreads, release_threads
from mmspec.errors import UserError

MAX_NUM_SEQS = 32
"""Default maximum batch size."""

CHUNK = 512
"""Default prefill chunk while other sequences decode, in tokens per step."""

IDLE_DELAY_SECONDS = 0.25
"""Seconds without sequences before idle work starts, so that back-to-back requests never wait for idle work."""

IDLE_TIME_SHARE = 0.1
"""Share of idle time that idle work takes, so that new sequences rarely wait for a turn to end."""

_log = logging.getLogger("mmspec")
_ENGINES: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # by id of the target, which the engine keeps alive
_ALL: WeakSet[Engine] = WeakSet()
_LOCK = threading.Lock()
_LOCAL = threading.local()  # the engine whose worker this thread is
_FORKING = ExitStack()  # locks and pauses held while the process forks
_FORK_SECONDS = 5.0  # maximum wait of a fork for running steps


class IdleTask(Protocol):
    """Work for an engine's worker thread while no sequence runs or waits: ``turn`` takes some milliseconds, and is
    called while ``pending`` is true; ``close`` is called at the end of the process."""

    @property
    def pending(self) -> bool: ...
    def turn(self) -> None: ...
    def close(self) -> None: ...


class Engine:
    """Continuous-batching engine of one target.

    A worker thread runs steps while there are sequences. Clients submit requests, whose sinks the worker calls.

    Args:
        chunk: prompt tokens prefilled per step while other sequences decode.

    Attributes:
        core: runs the steps, in the worker thread.
        idle: idle tasks; weak references.
        threads: chooses the number of torch's threads.
    """

    core_class: ClassVar[type[EngineCore]] = EngineCore

    def __init__(self, target: Target, *, max_num_seqs: int = MAX_NUM_SEQS, chunk: int = CHUNK) -> None:
        self.target = target
        self._changed = threading.Condition()  # re-entrant: a stream may be garbage collected anywhere
        self.core = self.core_class(target, max_num_seqs, chunk, self._changed)
        self._worker: threading.Thread | None = None  # while it runs steps
        self._last_worker: threading.Thread | None = None  # may still be exiting
        self.idle: WeakSet[IdleTask] = WeakSet()
        self.threads = TorchThreads(adapts=target.device.type == "cpu")
        self._stepping = False
        self._closed: Exception | None = None  # the reason for rejecting new sequences
        self._pauses = self._drains = 0  # threads that wait for a step to end, and for the worker to end
        self._task: IdleTask | None = None  # of this turn
        self._idle_from = 0.0  # earliest clock time of the next idle turn
        _ALL.add(self)

    @classmethod
    def of(cls, target: Target, max_num_seqs: int = MAX_NUM_SEQS) -> Engine:
        """Return the engine that all pipelines of a target share, with at least this maximum batch size."""
        with _LOCK:
            engine = _ENGINES.get(id(target))
            if engine is None:
                engine = _ENGINES[id(target)] = cls(target, max_num_seqs=max_num_seqs)
            engine.core.scheduler.allow(max_num_seqs)
            return engine

    @property
    def max_num_seqs(self) -> int:
        return self.core.scheduler.max_num_seqs

    def submit(self, request: DecodeRequest, speculation: Speculation, sink: Sink) -> Sequence:
        """Queue a request for decoding.

        Args:
            speculation: drafter and policies on this target. Only sequences with equal ``speculation`` and number of
                draft tokens are batched; plain decoding joins adaptive drafting.
            sink: see ``Sequence``; must not block.

        Raises:
            UserError: called from a logits processor or stopping criterion of this engine.
        """
        caller: Engine | None = getattr(_LOCAL, "engine", None)
        held = caller.core.key if caller else None
        if caller is self or (held and held.speculation.shares(speculation)):
            raise UserError("a logits processor or stopping criterion cannot call its own pipeline")
        release_threads()  # the caller's threads: from now on the worker computes
        key = BatchKey(speculation, request.num_draft_tokens or None, self.target.batch_key(request.prompt))
        sequence = Sequence(request, sink, key)
        with self._changed:
            if self._closed is not None:
                raise self._closed
            self.core.add(sequence)
            self._wake()
        return sequence

    @property
    def prefixes(self) -> PrefixCache | None:
        """The prefix cache; None without one."""
        return None if self.core.prefixes is None else self.core.prefixes.prefixes

    def use_prefixes(self, prefixes: PrefixCache | None) -> None:
        """Set the prefix cache, after all sequences have ended. Raises ``UserError``: the target keeps no states."""
        if prefixes is not None and not isinstance(self.target, KeepsStates):
            name = type(self.target).__name__
            raise UserError(f"prefix_cache needs a target that keeps states: {name} does not")
        with self.drained():
            if (before := self.prefixes) is not None:
                self.idle.discard(before)
            self.core.use_prefixes(prefixes)
            if prefixes is not None:
                self.idle.add(prefixes)

    def admit(self, request: Request) -> Request:
        """Adapt a request to this engine, before encoding. Raises ``UserError``: the engine cannot decode it."""
        return request

    def together(self) -> AbstractContextManager[Any]:
        """Context manager that schedules all sequences added in it together: no step starts before its end."""
        return self._changed

    def remove(self, sequences: abc.Iterable[Sequence]) -> None:
        """Cancel sequences and free their rows before the next step. No effect on finished sequences."""
        self.core.cancel(sequences)

    def drain(self) -> None:
        """Wait until all sequences have ended and their rows are free, without waiting for idle work."""
        with self.drained():
            last = self._last_worker
        if last is not None:
            last.join()

    @contextmanager
    def drained(self) -> abc.Iterator[None]:
        """Run a block after all sequences have ended; new sequences wait for its end."""
        with self._on_device(), self._changed:
            self._drains += 1
            try:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._worker is None)
                yield
            finally:
                self._drains -= 1

    def close(self) -> None:
        """Cancel all sequences and reject new requests."""
        with self._changed:
            self._closed = RuntimeError("the interpreter is shutting down")
            self.remove(self.core.sequences)
        self.drain()
        for task in list(self.idle):
            _run_idle(task, task.close)

    def _wake(self) -> None:
        """Start the worker, or notify it of new sequences."""
        if self._worker is None:
            self._worker = self._last_worker = threading.Thread(target=self._run, name="mmspec engine", daemon=True)
            self._worker.start()
        else:
            self._changed.notify_all()  # it may be waiting for the next turn of idle work

    def _run(self) -> None:
        """Run steps until neither sequences nor idle work is left."""
        _LOCAL.engine = self
        self.threads.begin()
        with self._on_device():
            while self._has_work():
                self._turn()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Set the CUDA device of a thread that runs steps."""
        device = self.target.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _has_work(self) -> bool:
        """Whether to run another turn; if not, the worker is marked as ended."""
        with self._changed:
            self._stepping, self._task = False, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses)
            if not self.core.has_work:
                self.core.clear()
                self._task = self._idle_task()
                if self._task is None and not self.core.has_work:
                    self._worker = None
                    self._changed.notify_all()
                    return False
            self._stepping = True
            return True

    def _idle_task(self) -> IdleTask | None:
        """Wait for idleness, then return a task with pending work; None if sequences arrive or no work is pending."""

        def disturbed() -> bool:
            return self._closed is not None or self._drains > 0 or self.core.has_work

        if not any(task.pending for task in list(self.idle)):
            return None
        if self._changed.wait_for(disturbed, max(0.0, self._idle_from - clock())):
            return None
        self._changed.wait_for(lambda: not self._pauses)
        return None if disturbed() else next((task for task in list(self.idle) if task.pending), None)

    def _turn(self) -> None:
        """Run one step, or one turn of idle work."""
        if (task := self._task) is not None:
            start = clock()
            if not _run_idle(task, task.turn):
                self.idle.discard(task)
            self._idle_from = clock() + (clock() - start) * (1 / IDLE_TIME_SHARE - 1)
            return
        self.threads.start_step()
        try:
            self.threads.end_step(self.core.step())
        except Exception as error:
            self.core.abort(error)
        except BaseException as error:  # SystemExit of a processor must not end the worker
            self.core.abort(RuntimeError(f"decoding was interrupted by {type(error).__name__}"))
        self._idle_from = clock() + IDLE_DELAY_SECONDS

    @contextmanager
    def paused(self, seconds: float | None = None) -> abc.Iterator[None]:
        """Run a block between two steps, while the worker changes neither target nor drafter. After a timeout of
        ``seconds``, the block runs concurrently with a step."""
        with self._changed:
            self._pauses += 1
            try:
                between = lambda: not self._stepping or self._worker is threading.current_thread()  # noqa: E731
                self._changed.wait_for(between, seconds)
                yield
            finally:
                self._pauses -= 1
                self._changed.notify_all()

    def restart(self) -> None:
        """Reset the engine in a forked process, without the threads and sequences of its parent."""
        worker, self._worker = self._worker, None
        self._last_worker, self._pauses, self._drains = None, 0, 0
        if worker is None:
            return
        lost = UserError("this answer began before the process forked: expected its parent to read it")
        for sequence in self.core.sequences:
            sequence.fail(lost)
            if sequence.request.streams:  # other clients are threads of the parent, which may have held locks
                sequence.emit()
        if self._stepping or self.target.device.type != "cpu":
            self._closed = UserError("the process forked during a step: expected a model that is loaded after the fork")
        else:
            self.core.reset()
        self.core.clear()


def _run_idle(task: IdleTask, work: abc.Callable[[], None]) -> bool:
    """Run a method of a task. Returns whether it succeeded; an error is logged and does not reach the engine."""
    try:
        work()
    except Exception:
        _log.exception("%s was stopped by an error; answers do not depend on it", type(task).__name__)
        return False
    return True


@atexit.register
def _close_all() -> None:
    """Stop the workers before interpreter shutdown, which a thread inside a kernel would crash."""
    for engine in list(_ALL):
        engine.close()


def _before_fork() -> None:
    """Wait for running steps, so that a forked process gets consistent states and free locks."""
    release_threads()  # the forked process would not have these threads
    _FORKING.enter_context(_LOCK)
    for engine in list(_ALL):
        _FORKING.enter_context(engine.paused(_FORK_SECONDS))
        # An exiting thread still holds locks of MKL after Python has dropped it.
        last, until = engine._last_worker, clock() + _FORK_SECONDS
        while (
            engine._worker is None and last and os.path.exists(f"/proc/self/task/{last.native_id}") and clock() < until
        ):
            sleep(0.001)


def _after_fork_in_child() -> None:
    _FORKING.close()
    for engine in list(_ALL):
        engine.restart()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_FORKING.close, after_in_child=_after_fork_in_child)
