"""Progress: lines in a log, a live bar on a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console

from mmspec.progress import EVERY, LogLines, show_progress


class Clock:
    """A clock that stands until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def logged(*steps: tuple[float, int | float, str]) -> list[str]:
    """Lines of a run of four items; ``steps`` are seconds since the start, items done and the current part."""
    clock, console = Clock(), Console(file=io.StringIO())
    lines = LogLines(console, "measuring", clock)
    for seconds, completed, part in steps:
        clock.now = 100.0 + seconds
        lines(completed, 4, part=part)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_line_at_the_start_and_at_the_end() -> None:
    assert logged((0, 0, ""), (1, 1, ""), (2, 2, ""), (75, 4, "")) == [
        "measuring: 0/4, 0:00:00",
        "measuring: 4/4, 0:01:15",
    ]


def test_a_line_for_every_part() -> None:
    assert logged((0, 0, ""), (1, 1, "pope"), (2, 2, "pope"), (3, 3, "gqa"), (4, 4, "gqa")) == [
        "measuring: 0/4, 0:00:00",
        "measuring: 1/4, pope, 0:00:01",
        "measuring: 3/4, gqa, 0:00:03",
        "measuring: 4/4, gqa, 0:00:04",
    ]


def test_a_line_when_the_last_is_long_ago() -> None:
    steps = [(0, 0, ""), (EVERY - 1, 1, ""), (EVERY, 2, ""), (2 * EVERY - 1, 3, ""), (2 * EVERY, 3, "")]
    assert [line.split(",")[0] for line in logged(*steps)] == ["measuring: 0/4", "measuring: 2/4", "measuring: 3/4"]


def test_shares_are_percentages_and_lines_have_metrics() -> None:
    console = Console(file=io.StringIO())
    with show_progress(console, "training") as show:
        show(0.0, 1.0, "step 0")
        show(1.0, 1.0, "step 9 loss 0.250")
    assert re.sub(r"\d:\d\d:\d\d", "TIME", console.file.getvalue()).splitlines() == [  # type: ignore[attr-defined]
        "training: 0 %, step 0, TIME",
        "training: 100 %, step 9 loss 0.250, TIME",
    ]


def test_a_terminal_shows_a_bar_and_no_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with show_progress(console, "measuring") as show:
        show(0, 4)
        show(4, 4, part="pope")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[" in shown
    assert "4/4" in shown
    assert "pope" in shown
    assert "measuring:" not in shown


def test_a_quiet_console_shows_nothing() -> None:
    console = Console(file=io.StringIO(), quiet=True)
    with show_progress(console, "measuring") as show:
        show(4, 4)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
