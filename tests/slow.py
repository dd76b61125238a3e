"""``python -m tests.slow``: run the slow tests, and record in ``slow.json`` when they passed.

The record is written only where every slow test passed or was skipped, and at least one passed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "slow.json"
PACKAGES = ("torch", "transformers", "triton", "accelerate", "ray")


class Outcomes:
    """A pytest plugin that collects the tests that passed and those that were skipped."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)


def run(tests: Path = ROOT / "tests", record: Path = RECORD) -> int:
    """Run the slow tests below ``tests``; returns pytest's exit status."""
    print(describe(record), flush=True)
    outcomes, started, commit = Outcomes(), time.monotonic(), _commit()
    options = ["-c", str(ROOT / "pyproject.toml"), "-m", "slow", "-r", "s", str(tests)]
    status = int(pytest.main(options, plugins=[outcomes]))
    if status == 0 and outcomes.passed:
        content = {
            "passed": len(outcomes.passed),
            "skipped": sorted(outcomes.skipped),
            "seconds": round(time.monotonic() - started),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit,
            "python": platform.python_version(),
            "packages": _versions(),
        }
        part = record.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, record)
    print(describe(record))
    return status


def describe(record: Path) -> str:
    """One line: when the slow tests last passed."""
    if not record.exists():
        return "slow tests: no run has passed yet"
    content: dict[str, Any] = json.loads(record.read_text())
    skipped = f", {len(content['skipped'])} skipped" if content["skipped"] else ""
    return (
        f"slow tests: last passed {content['date']} at {content['commit']}:"
        f" {content['passed']} passed{skipped} in {content['seconds']} s"
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(run())
