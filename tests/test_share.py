"""The share of tests that continuous integration runs: its order, its end and what it reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.share import LEAST, UNTIL, order, recent

ROOT = Path(__file__).parents[1]
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")
OTHERS = [f"tests/ssm/test_{name}.py" for name in NAMES]

# Notes which worker ran it.
NOTING = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(2))
def test_it(number):
    with open(pathlib.Path(__file__).parents[2] / "ran.txt", "a") as file:
        print(os.environ.get("PYTEST_XDIST_WORKER"), pathlib.Path(__file__).stem, number, file=file)
"""

# Time, in every process of tests, goes by a step whenever a test asks for it.
STEPPING = """
import itertools, os
def pytest_sessionstart(session):
    steps = itertools.count(0, int(os.environ["STEP"]))
    session.config.pluginmanager.get_plugin("share").clock = lambda: next(steps)
"""


def git(folder: Path, *arguments: str, hour: float = 0) -> str:
    """What git prints; its variables and settings of outside do not count."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), f"{1_750_000_000 + int(3600 * hour)} +0000")
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, hour: float, **files: str) -> str:
    """A commit of files (``__`` in names for ``/``) with this content; returns its hash."""
    for name, content in files.items():
        write(folder, {f"{name.replace('__', '/')}.py": content})
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "x", hour=hour)
    return git(folder, "rev-parse", "HEAD")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    return tmp_path


def test_files_of_the_last_day(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    commit(repository, 0, old="1", mmspec__early="1")
    commit(repository, 30, mmspec__early="2")
    head = commit(repository, 50, new="1")
    assert recent(repository) == (head, {"mmspec/early.py", "new.py"})
    head = commit(repository, 90)  # without files
    assert recent(repository) == (head, set())
    git(repository, "switch", "--quiet", "-c", "branch")
    commit(repository, 91, mine="1")
    git(repository, "switch", "--quiet", "main")
    commit(repository, 120, other="1")
    git(repository, "merge", "--quiet", "--no-ff", "-m", "x", "branch", hour=150)  # as recent as the merge itself
    assert recent(repository)[1] == {"mine.py"}
    clone = tmp_path_factory.mktemp("clones") / "clone"
    git(repository, "clone", "--quiet", "--depth", "1", f"file://{repository}", str(clone))
    assert recent(clone)[1] == {"mmspec/early.py", "old.py", "new.py", "mine.py", "other.py"}


def test_without_git_nothing_is_recent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recent(tmp_path) == ("", set())
    monkeypatch.setenv("PATH", "")
    assert recent(ROOT) == ("", set())


def test_modules_that_a_change_concerns_come_first(tmp_path: Path) -> None:
    files = {
        "tests/mmspec/test_tree.py": "import mmspec.verify",
        "tests/vision/test_images.py": "from mmspec.vision.drafters import msd\nfrom tests.pictures import picture",
        "tests/test_blocks.py": "",
    }
    write(tmp_path, files | dict.fromkeys(OTHERS, "import mmspec.ssm"))
    tree, images, blocks = files
    for changed, concerned in {
        "mmspec/tree.py": tree,
        tree: tree,
        "mmspec/verify.py": tree,
        "vision/drafters/msd.py": images,
        "vision/drafters/__init__.py": images,
        "tests/pictures.py": images,
        "vision/embedded/model/weights.bin": images,
        "docs/page.md": blocks,
        "tests/mmspec/data.h": tree,
    }.items():
        for seed in NAMES:
            assert order([*files, *OTHERS], tmp_path, seed, {changed})[0] == concerned, (changed, seed)
    for seed in NAMES:  # what has changed itself is before what uses it
        assert order([*files, *OTHERS], tmp_path, seed, {"mmspec/verify.py", images})[:2] == [images, tree]


def test_each_commit_draws_an_order_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(OTHERS, ""))
    orders = {seed: order(OTHERS, tmp_path, seed, set()) for seed in map(str, range(50))}
    assert {first for first, *_ in orders.values()} == set(OTHERS)
    assert orders == {seed: order(OTHERS[::-1], tmp_path, seed, set()) for seed in orders}


def share(folder: Path, *options: str, step: int = 0, began: int = 0) -> tuple[int, str]:
    """Exit status and output of a share of the tests in a folder."""
    write(folder, {"pytest.ini": "[pytest]\n", "tests/conftest.py": STEPPING})
    environment = os.environ | {"STEP": str(step), "SHARE_BEGAN": str(began), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.share", "-c", folder / "pytest.ini", folder / "tests"]
    command += ["--import-mode=importlib", "-r", "s", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def ran(folder: Path) -> list[list[str]]:
    """Worker, module and number of each test that has run."""
    path = folder / "ran.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_both_workers_start_with_modules_that_a_commit_concerns(repository: Path) -> None:
    commit(repository, 0, **{f"tests__ssm__test_{name}": NOTING.replace("range(2)", "range(3)") for name in NAMES})
    commit(repository, 48, tests__ssm__test_fifth=NOTING, tests__ssm__test_sixth=NOTING)
    status, output = share(repository, "-n", "2")
    assert (status, len(ran(repository))) == (0, 16), output
    workers = {worker: [module for by, module, _ in ran(repository) if by == worker] for worker in ("gw0", "gw1")}
    assert {workers["gw0"][0], workers["gw1"][0]} == {"test_fifth", "test_sixth"}
    assert not set(workers["gw0"]) & set(workers["gw1"])
    assert "share: 16 tests ran, 0 were left out" in output


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("began", "step", "each"), [(0, UNTIL // 3, 2), (-2 * UNTIL, LEAST // 3, 2), (0, UNTIL, 0)])
def test_no_test_starts_after_the_deadline(tmp_path: Path, workers: int, began: int, step: int, each: int) -> None:
    write(tmp_path, dict.fromkeys(OTHERS, NOTING))
    status, output = share(tmp_path, "-n", str(workers), began=began, step=step)
    assert (status, len(ran(tmp_path))) == (0, each * workers), output
    assert f"share: {each * workers} tests ran, {12 - each * workers} were left out" in output
    modules = {module for _, module, _ in ran(tmp_path)}
    for path in OTHERS:
        assert (f"{path.removesuffix('.py')}=2" in output) == (Path(path).stem not in modules), output


def test_a_module_that_was_begun_is_torn_down(tmp_path: Path) -> None:
    fixture = """
@pytest.fixture(autouse=True, scope="module")
def whole():
    yield
    assert False, "something is left"
"""
    write(tmp_path, dict.fromkeys(OTHERS, NOTING + fixture))
    status, output = share(tmp_path, "-n", "0", step=UNTIL // 2)
    assert (status, len(ran(tmp_path))) == (1, 1), output
    assert "1 error, 11 left out" in output, output


@pytest.mark.parametrize(
    ("source", "workers", "step", "status"),
    [
        ("def test_it(): assert False", 0, 0, 1),
        ("def test_it(): assert False", 0, UNTIL, 0),
        ("def test_it(): assert False", 2, UNTIL, 0),
        ("import pytest\n@pytest.mark.skip\ndef test_it(): pass", 0, 0, 1),
        ("import pytest\n@pytest.mark.skip\ndef test_it(): pass", 2, 0, 1),
        ("", 0, 0, 0),
        ("", 2, 0, 0),
        ("import nothing_of_this_name", 0, 0, 2),
        ("import nothing_of_this_name", 2, 0, 1),
    ],
)
def test_exit_status(tmp_path: Path, source: str, workers: int, step: int, status: int) -> None:
    write(tmp_path, {"tests/test_it.py": source})
    found, output = share(tmp_path, "-n", str(workers), step=step)
    assert found == status, output
