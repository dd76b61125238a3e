"""Interleaved timing of plain calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter as clock
from typing import Any, TypeVar

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


def interleaved_medians(calls: Mapping[T, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[T, float]:
    """Median seconds of each call, interleaved; see ``interleaved``."""

    def timed(call: Callable[[], Any]) -> float:
        start = clock()
        call()
        return clock() - start

    times = interleaved({name: partial(timed, call) for name, call in calls.items()}, rounds, warm_up)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items from another one on in each turn, so that none always runs after the same one."""
    shift = turn % max(len(items), 1)
    return [*items[shift:], *items[:shift]]
