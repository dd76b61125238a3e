"""Progress of long commands: a live bar or the current step on a terminal, lines in a log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30.0  # seconds after which a log gets another line
SLOW = 1.0  # seconds after which a log gets a line about a running step
PART = logging.INFO - 5  # level of a part of a step


Show = Callable[..., None]
"""``show(completed, total, metrics="", part="")`` shows the progress so far: numbers of items, or shares of 1.0 if they
are floats; metrics that change at every call; the name of the current part, whose change is a line in a log."""


class LogLines:
    """Prints progress with the elapsed time: at start and end, when the part changes, and every ``EVERY`` seconds.

    ``title`` is the first word of each line.
    """

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title, self._start = console, title, monotonic()
        self._last: tuple[float, str] | None = None  # time and part of the last line

    def __call__(self, completed: float, total: float, metrics: str = "", part: str = "") -> None:
        now = monotonic()
        if self._last and completed < total and part == self._last[1] and now - self._last[0] < EVERY:
            return
        self._last = now, part
        elapsed = str(timedelta(seconds=int(now - self._start)))
        fields = [_count(completed, total), part, metrics, elapsed]
        text = f"{self.title}: {', '.join(filter(None, fields))}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def show_progress(console: Console, title: str) -> Iterator[Show]:
    """Yield a function that shows progress: a live bar on a terminal, else ``LogLines``; nothing on a quiet console."""
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


class Steps(logging.Handler):
    """Shows the current step, as logged at level INFO, until the next step.

    On a terminal with a spinner, also parts of steps (level PART), else in a line after ``SLOW`` seconds. Records of
    higher levels are printed at once.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(PART if console.is_terminal else logging.INFO)
        self._console = console
        self._status = console.status("") if console.is_terminal and not console.quiet else None
        self._waiting: Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.end()
        text = self.format(record)
        if record.levelno > logging.INFO:
            self._print(text)
        elif self._status is not None:
            self._status.update(escape(f"{text} ..."))
            self._status.start()
        else:
            self._waiting = Timer(SLOW, self._print, [text])
            self._waiting.daemon = True
            self._waiting.start()

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting.join()
            self._waiting = None

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def show_steps(console: Console) -> Iterator[None]:
    """Show steps logged by mmspec during the block, see ``Steps``; nested blocks show them once."""
    log = logging.getLogger("mmspec")
    if any(isinstance(handler, Steps) for handler in log.handlers):
        yield
        return
    steps, level, propagated = Steps(console), log.level, log.propagate
    log.propagate = propagated and log.isEnabledFor(logging.INFO) and not console.is_terminal
    log.addHandler(steps)
    log.setLevel(steps.level)
    try:
        yield
    finally:
        log.removeHandler(steps)
        log.setLevel(level)
        log.propagate = propagated
        steps.end()


def _count(completed: float, total: float) -> str:
    return f"{100 * completed / total:.0f} %" if isinstance(total, float) else f"{completed}/{total}"
