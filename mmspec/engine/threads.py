"""Numbers of threads of the C++ kernels and of torch's OpenMP.

The first decode steps measure whether all processors or half of them are faster. Each Python thread has an OpenMP team;
client threads release their teams. On a busy machine, a parallel region of torch waits for threads that the system has
not scheduled, so the worker uses fewer threads of torch; the kernels do not wait for them (``cpp/pool.h``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter as clock
from time import thread_time

import torch

from mmspec.ops.cpu import limit_torch, use_kernel_threads

_WINDOW = 0.25  # seconds of steps between decisions
_MUCH, _LITTLE = 0.25, 0.05  # high and low delays, as fractions of step time
_FIRST, _LAST = 1.0, 60.0  # seconds without delays before trying more threads: initial, maximum
_TASKS = Path("/proc/self/task")
_SOFT = 1  # omp_pause_soft keeps settings
_PROCESS = os.getpid()
_STEPS, _GAIN = 5, 0.95  # steps per number of threads and of tokens; ratio of times below which fewer threads are kept
_NUMBER = "OMP_NUM_THREADS"


def fix_threads(count: int) -> None:
    """Set torch's number of threads for the process, as the user's choice: the number that engines then use."""
    os.environ[_NUMBER] = str(count)
    torch.set_num_threads(count)


@contextmanager
def restored_threads() -> Iterator[None]:
    """Undo ``fix_threads`` at the end of the block."""
    before, chosen = torch.get_num_threads(), os.environ.get(_NUMBER)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        os.environ.pop(_NUMBER, None)
        if chosen is not None:
            os.environ[_NUMBER] = chosen


class ThreadTrial:
    """Chooses the number of kernel threads: decode steps alternate between all threads and half of them.

    Times are compared among steps over equal numbers of tokens. Unless half is faster, all are kept, as prompts gain
    more from threads than decoding.

    Attributes:
        count: number of threads for the next step.
        ended: whether ``count`` is final.
    """

    def __init__(self, most: int) -> None:
        self._counts = most, most // 2
        self._seconds: dict[int, tuple[list[float], list[float]]] = {}  # of both numbers, by tokens of the step
        self.count, self.ended = most, _NUMBER in os.environ or most == 1
        self._began = clock()

    @property
    def expired(self) -> bool:
        """Whether half was chosen some time ago: the programs that kept the other processors busy may have ended."""
        return self.ended and self.count < self._counts[0] and clock() - self._began >= _LAST

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step with ``count`` threads over this number of tokens."""
        most, half = self._counts
        both = self._seconds.setdefault(tokens, ([], []))
        both[self.count == half].append(seconds)
        self.count = half if len(both[0]) > len(both[1]) else most
        if min(map(len, both)) >= _STEPS:
            self.count = half if median(both[1]) < _GAIN * median(both[0]) else most
            self.ended = True


class TorchThreads:
    """Adapts the number of torch's threads in a worker thread to scheduling delays in recent steps.

    The number is halved while delays are high and doubled after some time without delays. If doubling brings the delays
    back, the next attempt comes after twice that time. Other threads are not affected.

    Args:
        adapts: adapt the number; False if steps run on another device or wait for other ranks.

    Attributes:
        most: number of threads on a quiet machine.
        count: number of threads used in steps.
        trial: of the kernels' number of threads.
    """

    def __init__(self, adapts: bool = True) -> None:
        self._adapts = adapts
        self._delays: dict[str, int] | None = None  # nanoseconds by thread, at the start of the window
        self._reset(torch.get_num_threads())

    def _reset(self, most: int) -> None:
        self.most = self.count = most
        self.trial = ThreadTrial(most)
        self._wall = self._delayed = 0.0
        self._quiet, self._wait = 0.0, _FIRST  # seconds without delays: so far, and before trying more threads
        self._raised = False  # the last change was an increase, not yet confirmed

    def begin(self) -> None:
        """Called in a new thread before its first step."""
        if (most := torch.get_num_threads()) != self.most:
            self._reset(most)
        elif self.trial.expired:
            self.trial = ThreadTrial(most)
        self._delays, self._wall, self._delayed = _delays(), 0.0, 0.0
        self._apply(most)
        use_kernel_threads(self.trial.count)

    def start_step(self) -> None:
        self._started = clock(), thread_time()

    def end_step(self, tokens: int = 0) -> None:
        """Called after a step, with the number of ``tokens`` in its pass; 0 if it was not only a decode step."""
        wall, computed = clock() - self._started[0], thread_time() - self._started[1]
        if tokens and not self.trial.ended:
            self.trial.add(tokens, wall)
            use_kernel_threads(self.trial.count)
        self._wall += wall
        self._delayed += max(0.0, wall - computed)
        if not self._adapts or self.most == 1 or self._wall < _WINDOW:
            return
        before, self._delays = self._delays, _delays()
        if before is not None and self._delays is not None:
            self._delayed = sum(delay - before.get(thread, 0) for thread, delay in self._delays.items()) / 1e9
        count = self.count
        self.record(self._wall, self._delayed)
        self._wall = self._delayed = 0.0
        self._apply(count)

    def record(self, wall: float, delayed: float) -> None:
        """Update the number from a window of steps.

        Args:
            wall: wall-clock seconds of the steps.
            delayed: seconds in which threads were runnable but not running, summed over threads.
        """
        self._quiet = self._quiet + wall if delayed <= _LITTLE * wall else 0.0
        if delayed > _MUCH * wall and self.count > 1:
            self._wait = min(2 * self._wait, _LAST) if self._raised else self._wait
            self.count //= 2
            self._raised = False
        elif self._quiet >= self._wait:
            if self.count == self.most:
                self._wait = _FIRST
            self._raised = self.count < self.most
            self.count = min(2 * self.count, self.most)
            self._quiet = 0.0

    def _apply(self, before: int) -> None:
        if self.count != before and not limit_torch(self.count):
            self._adapts = False
            self._reset(self.most)


def _delays() -> dict[str, int] | None:
    """Run-queue wait of each thread of this process in nanoseconds; None if the system does not report it."""
    delays = {}
    for task in _TASKS.glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            delays[task.parent.name] = int(task.read_text().split()[1])
    return delays or None


def release_threads() -> None:
    """End the calling thread's OpenMP threads; its next computation starts new threads.

    If the teams of all Python threads, idle teams included, have more threads than there are processors, libgomp stops
    spinning at barriers; a decode step has hundreds and takes several times as long. No effect without libgomp.
    """
    if os.getpid() != _PROCESS:
        return  # after a fork, libgomp would wait for threads of the parent
    if (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the libgomp that torch uses; None if torch uses another OpenMP runtime."""
    library = ctypes.CDLL(torch._C.__file__)
    if not hasattr(library, "GOMP_parallel") or hasattr(library, "__kmpc_fork_call"):  # LLVM's OpenMP
        return None
    pause: Callable[[int], int] | None = getattr(library, "omp_pause_resource_all", None)  # since GCC 9
    return pause
