"""A pytest plugin that runs a share of the selected tests: ``make share``.

Test modules concerned by commits of the last day run first, the others in a random order per commit;
xdist gives each worker the next module of this order, whole. No test starts later than ``UNTIL`` seconds after
``SHARE_BEGAN``, a variable of the environment in seconds since 1970 (by default now), but ``LEAST`` seconds are left to
the tests wherever that is later. Tests left out are skipped.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.imports import imported

UNTIL, LEAST = 21 * 60, 5 * 60
_end = 0.0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    global _end
    _end = max(float(os.environ.get("SHARE_BEGAN") or time.time()) + UNTIL, time.time() + LEAST)
    modules = order({item.path for item in items}, config.rootpath)
    items.sort(key=lambda item: modules.index(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() >= _end:
        pytest.skip("no time is left for it")


def order(modules: set[Path], root: Path) -> list[Path]:
    """Test modules: those changed in the last day, then those that test or import changed code, then the others."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.split()

    changed = set(git("log", "--first-parent", "--name-only", "--format=", "--since=1.day"))
    stems = {Path(name).stem for name in changed if name.endswith(".py")}
    drawn = sorted(modules)
    random.Random(str(git("rev-parse", "HEAD"))).shuffle(drawn)

    def is_concerned(module: Path) -> bool:
        names = {part for name in imported(module.read_text()) for part in name.split(".")[-2:]}
        return bool({*names, module.stem.removeprefix("test_")} & stems)

    return sorted(drawn, key=lambda module: (str(module.relative_to(root)) not in changed, not is_concerned(module)))
