"""A pytest plugin that runs a share of the selected tests: ``make share``.

Test modules concerned by commits of the last day run first, the others in a random order per commit;
xdist gives each worker the next module of this order, whole. No test starts later than ``UNTIL`` seconds after
``SHARE_BEGAN``, a variable of the environment in seconds since 1970 (by default now), but ``LEAST`` seconds are left to
the tests wherever that is later. The number of tests left out is printed at the end.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.imports import imported

UNTIL, LEAST = 21 * 60, 5 * 60
DAY = 24 * 60 * 60
LEFT_OUT = "no time is left for it"


def pytest_configure(config: pytest.Config) -> None:
    began = float(os.environ.get("SHARE_BEGAN") or time.time())
    config.pluginmanager.register(Share(config.rootpath, began, time.time), "share")


class Share:
    """Orders the tests and leaves those out that would start too late.

    Attributes:
        clock: seconds since 1970.
        ran: the number of tests that have run.
        left_out: the number of tests left out, by module.
    """

    def __init__(self, root: Path, began: float, clock: Callable[[], float]) -> None:
        self.clock, self.ran, self.left_out = clock, 0, Counter[str]()
        self._root, self._deadline = root, began + UNTIL

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        modules = order({_module(item.nodeid) for item in items}, self._root, *recent(self._root))
        items.sort(key=lambda item: modules.index(_module(item.nodeid)))
        self._deadline = max(self._deadline, self.clock() + LEAST)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self.clock() >= self._deadline:
            pytest.skip(LEFT_OUT)  # fixtures of a module that was begun are torn down as ever

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.left_out[_module(report.nodeid)] += _is_left_out(report)
        self.ran += report.when == "call" or (report.when == "setup" and report.failed)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("left out", "", "LEFT OUT") if _is_left_out(report) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A share without tests is an error only where tests were selected and time was left."""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            failed = not self.ran and self.left_out.total() < session.testscollected
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"share: {self.ran} tests ran, {self.left_out.total()} were left out")
        for name, count in self.left_out.most_common():
            if count:
                terminalreporter.write_line(f"  {count} of {name}")


def recent(root: Path) -> tuple[str, set[str]]:
    """The commit, and the files that it and commits of the day before it have changed; none where git cannot tell."""
    commit, _, seconds = _git(root, "log", "-1", "--format=%H %ct").partition(" ")
    if not commit:
        return "", set()
    log = ("log", "--first-parent", "--name-only", "--format=")
    names = _git(root, *log, f"--since={int(seconds) - DAY}") or _git(root, *log, "-1")
    return commit, set(names.splitlines())


def order(modules: Iterable[str], root: Path, commit: str, changed: set[str]) -> list[str]:
    """Paths of test modules: first changed modules, then modules that test or import changed code, then the rest."""
    drawn = sorted(modules)
    random.Random(commit).shuffle(drawn)
    stems = {Path(name).stem for name in changed if name.endswith(".py")}

    def is_concerned(module: str) -> bool:
        names = {Path(module).stem.removeprefix("test_"), Path(module).stem}
        for name in imported((root / module).read_text()):
            names |= set(name.split(".")[-2:])
        return bool(names & stems)

    return sorted(drawn, key=lambda module: (module not in changed, not is_concerned(module)))


def _is_left_out(report: pytest.TestReport) -> bool:
    return report.when == "setup" and report.skipped and LEFT_OUT in str(report.longrepr)


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _git(root: Path, *arguments: str) -> str:
    """What git prints; nothing where it fails."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
