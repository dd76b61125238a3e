"""Interleaved timing of plain calls, and peak memory of a device, this process or another one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def interleaved(calls: Mapping[T, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[T, list[float]]:
    """What each call returned in every round, interleaved.

    Args:
        calls: return their seconds.
        warm_up: additional first rounds that are not measured.
    """
    seconds: dict[T, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + warm_up):
        for name, call in rotated(list(calls.items()), turn):
            spent = call()
            if turn >= warm_up:
                seconds[name].append(spent)
    return seconds


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items from another one on in each turn, so that none always runs after the same one."""
    shift = turn % max(len(items), 1)
    return [*items[shift:], *items[:shift]]


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak; on a CPU this needs Linux and write access to /proc."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak_memory_of("self")


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes since ``reset_peak_memory``; None on a CPU without Linux's /proc.

    On a GPU it counts torch's allocations; on a CPU the resident set of the process, weights and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory_of("self")


def reset_peak_memory_of(process: int | str) -> None:
    """Start a new peak of a process's resident set, by its id; Linux only."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/clear_refs").write_text("5")


def peak_memory_of(process: int | str) -> int | None:
    """Peak resident set of a process in bytes; None without Linux's /proc."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(match.group(1)) if match else None
