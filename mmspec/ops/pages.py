"""Memory of huge pages."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

PAGE = 2 << 20
"""Bytes of a huge page."""


def zeros(count: int) -> Tensor | None:
    """``count`` zeros in memory of huge pages, (count,) uint8; None where the system has none.

    With pages of 4 KiB, address translation would take as long as reading the memory in order.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    pages = mmap.mmap(-1, count + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:count]
