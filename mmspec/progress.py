"""Progress of long commands: a live bar on a terminal, lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30.0  # seconds after which a log gets another line


class Show(Protocol):
    def __call__(self, completed: float, total: float, metrics: str = "", part: str = "") -> None:
        """Show the progress so far.

        Args:
            completed, total: numbers of items, or shares of 1.0 if they are floats.
            metrics: changes at every call; shown with the others.
            part: what is in progress; a log gets a line when it changes.
        """


class LogLines:
    """Lines of progress with the elapsed time: at start and end, when the part changes, and every ``EVERY`` seconds.

    Args:
        console: of the lines.
        title: first word of each line.
        clock: returns seconds.
    """

    def __init__(self, console: Console, title: str, clock: Callable[[], float] = monotonic) -> None:
        self.console, self.title, self.clock = console, title, clock
        self._start = clock()
        self._last: tuple[float, str] | None = None  # time and part of the last line

    def __call__(self, completed: float, total: float, metrics: str = "", part: str = "") -> None:
        now = self.clock()
        if self._last and completed < total and part == self._last[1] and now - self._last[0] < EVERY:
            return
        self._last = now, part
        elapsed = str(timedelta(seconds=int(now - self._start)))
        fields = [_count(completed, total), part, metrics, elapsed]
        text = f"{self.title}: {', '.join(filter(None, fields))}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def show_progress(console: Console, title: str) -> Iterator[Show]:
    """Yield a function that shows progress: a live bar on a terminal, else ``LogLines``; nothing if it is quiet."""
    if not console.is_terminal or console.quiet:
        yield LogLines(console, title)
        return
    text = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}", markup=False))
    with Progress(*text, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(title, total=None, text="")

        def show(completed: float, total: float, metrics: str = "", part: str = "") -> None:
            shown = " ".join(filter(None, [_count(completed, total), part, metrics]))
            bar.update(task, completed=completed, total=total, text=shown)

        yield show


def _count(completed: float, total: float) -> str:
    return f"{100 * completed / total:.0f} %" if isinstance(total, float) else f"{completed}/{total}"
