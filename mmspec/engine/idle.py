"""Work of an engine's worker thread while no sequence runs or waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

IDLE_DELAY_SECONDS = 0.25
"""Seconds without a sequence before idle work begins: clients that send the next request at once never wait for it."""

IDLE_TIME_SHARE = 0.1
"""Share of idle time that idle work takes: a sequence that comes then rarely waits for the end of a turn."""

_log = logging.getLogger("mmspec")


class IdleTask(Protocol):
    """Work in short turns. Between two turns, the worker looks for new sequences."""

    @property
    def pending(self) -> bool:
        """Whether there is work."""

    def turn(self) -> None:
        """Work for some milliseconds."""

    def close(self) -> None:
        """Called at the end of the process, after the last turn."""


def run_idle(task: IdleTask, work: Callable[[], None]) -> bool:
    """Run a part of a task; an error is logged and ends the task, never the engine. Returns whether it succeeded."""
    try:
        work()
    except Exception:
        _log.exception("%s was stopped by an error; answers do not depend on it", type(task).__name__)
        return False
    return True
