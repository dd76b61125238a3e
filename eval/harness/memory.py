"""Peak memory of a device or of this process."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak; on a CPU this needs Linux and write access to /proc."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            _RESET.write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes since ``reset_peak_memory``; None on a CPU without Linux's /proc.

    On a GPU it counts torch's allocations; on a CPU the resident set of the process, weights and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found.group(1)) if found else None
