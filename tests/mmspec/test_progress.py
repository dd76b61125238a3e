"""Progress: lines in a log, a live bar on a terminal."""

import io
import logging
import re
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest
from rich.console import Console

from mmspec import progress
from mmspec.progress import EVERY, LogLines, Steps, show_progress, show_steps


def logged(*steps: tuple[float, int | float, str]) -> list[str]:
    """Lines of a run of four items; ``steps`` are seconds since the start, items done and the current part."""
    console, times = Console(file=io.StringIO()), iter([100.0, *(100.0 + seconds for seconds, _, _ in steps)])
    with patch.object(progress, "monotonic", lambda: next(times)):
        lines = LogLines(console, "measuring")
        for _, completed, part in steps:
            lines(completed, 4, part=part)
    return text_of(console).splitlines()


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_line_for_every_part_and_when_the_last_is_long_ago() -> None:
    assert logged((0, 0, ""), (1, 1, "pope"), (2, 2, "pope"), (3, 3, "gqa"), (4, 4, "gqa")) == [
        "measuring: 0/4, 0:00:00",
        "measuring: 1/4, pope, 0:00:01",
        "measuring: 3/4, gqa, 0:00:03",
        "measuring: 4/4, gqa, 0:00:04",
    ]
    steps = [(0, 0, ""), (EVERY - 1, 1, ""), (EVERY, 2, ""), (2 * EVERY - 1, 3, ""), (2 * EVERY, 3, "")]
    assert [line.split(",")[0] for line in logged(*steps)] == ["measuring: 0/4", "measuring: 2/4", "measuring: 3/4"]


def test_shares_are_percentages_and_lines_have_metrics() -> None:
    console = Console(file=io.StringIO())
    with show_progress(console, "training") as show:
        show(0.0, 1.0, "step 0")
        show(1.0, 1.0, "step 9 loss 0.250")
    assert re.sub(r"\d:\d\d:\d\d", "TIME", text_of(console)).splitlines() == [
        "training: 0 %, step 0, TIME",
        "training: 100 %, step 9 loss 0.250, TIME",
    ]


def test_a_terminal_shows_a_bar_and_no_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with show_progress(console, "measuring") as show:
        show(0, 4)
        show(4, 4, "loss 0.5", "pope")
    shown = text_of(console)
    assert all(part in shown for part in ("\x1b[", "4/4 pope loss 0.5"))
    assert "measuring:" not in shown


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("mmspec.load", level, "", 0, text, (), None)


def test_a_log_gets_a_line_about_each_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[MagicMock] = []

    def timer(seconds: float, function: Any, arguments: list[Any]) -> MagicMock:
        assert seconds == progress.SLOW
        timers.append(MagicMock(run=lambda: function(*arguments)))
        return timers[-1]

    monkeypatch.setattr(progress, "Timer", timer)
    console = Console(file=io.StringIO(), width=20)
    steps = Steps(console)
    steps.handle(record("a quick step"))
    steps.handle(record("a slow step [with a long name]"))
    timers[-1].run()
    steps.handle(record("a warning", logging.WARNING))
    steps.handle(record("another quick step"))
    steps.end()
    assert [one.method_calls for one in timers] == [[call.start(), call.cancel(), call.join()]] * 3
    lines = text_of(console).splitlines()
    assert lines == ["a slow step [with a long name]", "a warning"]


def test_a_terminal_shows_the_current_step() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with show_steps(console), show_steps(console):
        logging.getLogger("mmspec.load").info("loading %s", "[model]")
        logging.getLogger("mmspec.load").log(progress.PART, "a part")
        logging.getLogger("mmspec.load").debug("a detail")
        logging.getLogger("mmspec.calibrate").info("measuring")
    logging.getLogger("mmspec.load").info("a request")
    shown = text_of(console)
    assert 0 < shown.index("loading [model] ...") < shown.index("a part ...") < shown.index("measuring ...")
    assert "detail" not in shown
    assert "request" not in shown


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_reach_a_log_of_the_users(terminal: bool, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("mmspec")
    before = log.level, log.propagate, list(log.handlers)
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with show_steps(console):
        logging.getLogger("mmspec.load").info("unasked")
    assert (log.level, log.propagate, log.handlers) == before
    with caplog.at_level(logging.INFO, "mmspec"), show_steps(console):
        logging.getLogger("mmspec.load").info("loading")
        logging.getLogger("mmspec.load").log(progress.PART, "a part")
    assert caplog.messages == ([] if terminal else ["loading"])


def test_a_quiet_console_shows_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, quiet=True)
    with show_steps(console), show_progress(console, "measuring") as show:
        show(4, 4)
        logging.getLogger("mmspec.load").info("loading")
    assert not text_of(console)
