"""Numbers of threads: those of torch, which the engine lowers beside other programs, and of the C++ kernels."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

_LOCAL = threading.local()  # ``kernels``: threads of kernels that this thread calls


def kernel_threads() -> int:
    """Threads of a C++ kernel: torch's, without the limit of ``limit_torch``, as the kernels wait for no thread that
    the system does not run (``cpp/pool.h``)."""
    return getattr(_LOCAL, "kernels", None) or torch.get_num_threads()


def limit_torch(count: int, kernels: int) -> bool:
    """Set torch's number of threads in the calling thread alone; returns False where torch's OpenMP cannot do that.

    Args:
        count: threads of torch; ``torch.get_num_threads()`` returns it, in this thread.
        kernels: threads of the C++ kernels.
    """
    library = _openmp()
    if library is None:
        return False
    torch.get_num_threads()  # in a new thread, the first call would undo the limit
    library.omp_set_num_threads(count)
    if hasattr(library, "MKL_Set_Num_Threads_Local"):
        library.MKL_Set_Num_Threads_Local(count)
    _LOCAL.kernels = kernels
    return True


@cache
def _openmp() -> Any:
    """The library that torch computes with, if its OpenMP is linked to it."""
    library = ctypes.CDLL(torch._C.__file__)
    return library if hasattr(library, "omp_set_num_threads") else None
