"""OpenMP threads: torch has a team of them for each Python thread that computes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

import torch

_SOFT = 1  # omp_pause_soft: settings are kept
_PROCESS = os.getpid()


def release_threads() -> None:
    """End the calling thread's OpenMP threads; its next computation starts others.

    Teams of all Python threads count, idle ones too: once they have more threads than there are processors, libgomp no
    longer spins at barriers, and a decode step, which has hundreds of them, takes several times as long. Without
    libgomp, nothing happens.
    """
    if os.getpid() != _PROCESS:
        return  # after a fork, libgomp would wait for threads of the parent
    if (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """libgomp's function, in the library that torch computes with."""
    library = ctypes.CDLL(torch._C.__file__)
    if not hasattr(library, "GOMP_parallel") or hasattr(library, "__kmpc_fork_call"):  # the latter: LLVM's runtime
        return None
    pause: Callable[[int], int] | None = getattr(library, "omp_pause_resource_all", None)  # since GCC 9
    return pause
