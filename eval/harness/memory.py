"""The most memory that a piece of work held at once."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def start_watching(device: torch.device) -> None:
    """Forget earlier peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # only Linux has it, and not everybody may write to it
            _RESET.write_text("5")


def peak(device: torch.device) -> int | None:
    """Bytes at the peak since ``start_watching``; None where the system does not tell.

    On a GPU, those that torch allocated; on a CPU, those of the process, weights and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found.group(1)) if found else None
