"""The share of tests that continuous integration runs: its order, its end and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.share import UNTIL, order, recent

ROOT = Path(__file__).parents[1]
OTHERS = [f"tests/ssm/test_{name}.py" for name in ("first", "second", "third", "fourth")]
TEST = "import pytest\n@pytest.mark.parametrize('number', range(2))\ndef test_it(number): assert True\n"
# Time, in every process of tests, goes by a step whenever a test asks for it.
STEPPING = """
import itertools
def pytest_sessionstart(session):
    steps = itertools.count(0, {step})
    session.config.pluginmanager.get_plugin("share").clock = lambda: next(steps)
"""


def git(folder: Path, *arguments: str, hour: int = 0) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), f"{1_750_000_000 + 3600 * hour} +0000")
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)


def test_files_of_the_last_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recent(tmp_path) == ("", set())
    git(tmp_path, "init", "--quiet")
    for hour, name in ((0, "old"), (30, "early"), (50, "new")):
        (tmp_path / name).touch()
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", "x", hour=hour)
    head, names = recent(tmp_path)
    assert (len(head), names) == (40, {"early", "new"})
    monkeypatch.setenv("PATH", "")
    assert recent(tmp_path) == ("", set())


def test_modules_that_a_change_concerns_come_first(tmp_path: Path) -> None:
    tree, images = "tests/mmspec/test_tree.py", "tests/vision/test_images.py"
    files = {tree: "import mmspec.verify", images: "from mmspec.vision.drafters import msd\nimport tests.pictures"}
    for name, source in (files | dict.fromkeys(OTHERS, "import mmspec.ssm")).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    seeds = list(map(str, range(20)))
    for changed, concerned in (
        ("mmspec/tree.py", tree),
        (tree, tree),
        ("mmspec/verify.py", tree),
        ("vision/drafters/msd.py", images),
        ("tests/pictures.py", images),
    ):
        for seed in seeds:
            assert order([*files, *OTHERS], tmp_path, seed, {changed})[0] == concerned, (changed, seed)
    # What has changed itself is before what uses it.
    assert order([*files, *OTHERS], tmp_path, "1", {"mmspec/verify.py", images})[:2] == [images, tree]
    drawn = {seed: order(OTHERS, tmp_path, seed, set()) for seed in seeds}
    assert {first for first, *_ in drawn.values()} == set(OTHERS)
    assert drawn == {seed: order(OTHERS[::-1], tmp_path, seed, set()) for seed in seeds}


def share(folder: Path, source: str, workers: int, step: int) -> tuple[int, str]:
    """Exit status and output of a share of test modules."""
    files = dict.fromkeys(OTHERS, source) | {"pytest.ini": "[pytest]", "conftest.py": STEPPING.format(step=step)}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    environment = os.environ | {"SHARE_BEGAN": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.share", "-c", folder / "pytest.ini", folder / "tests"]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-n", str(workers)]
    command += ["--dist", "loadfile", "--no-loadscope-reorder"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "workers", "step", "status", "counts"),
    [
        (TEST, 2, 0, 0, "8 tests ran, 0 were left out"),
        (TEST, 2, UNTIL // 3, 0, "4 tests ran, 4 were left out"),  # a module by each worker
        (TEST, 0, UNTIL, 0, "0 tests ran, 8 were left out"),
        (TEST.replace("True", "False"), 0, 0, 1, "8 tests ran, 0 were left out"),
        (TEST.replace("True", "False"), 2, UNTIL, 0, "0 tests ran, 8 were left out"),
        ("import pytest\n@pytest.mark.skip\ndef test_it(): pass", 2, 0, 1, "0 tests ran, 0 were left out"),
        ("", 2, 0, 0, "0 tests ran, 0 were left out"),
    ],
)
def test_no_test_starts_after_the_deadline(
    tmp_path: Path, source: str, workers: int, step: int, status: int, counts: str
) -> None:
    found, output = share(tmp_path, source, workers, step)
    assert (found, f"share: {counts}" in output) == (status, True), output
