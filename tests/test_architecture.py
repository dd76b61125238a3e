"""Imports between packages and between the rooms of a package: arrows without circles.

A room is a folder of a package, or a single module beside such folders. Imports for type checkers only are exempt.
"""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.imports import imported

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "mmspec": set(),
    "vision": {"mmspec"},
    "ssm": {"mmspec"},
    "eval": {"mmspec", "vision", "ssm"},
    "demos": {"mmspec", "vision", "ssm"},
}
"""Packages, by the folder at the top of the repository, and what each may import."""

LAYERS = [
    {"errors", "version"},
    {"checks", "extras", "files", "progress", "workers"},
    {"jobs", "ops", "plugins"},
    {"core"},
    {"cache", "quantisation", "sampling"},
    {"targets"},
    {"drafters"},
    {"engine"},
    {"adaptation"},
    {"pipeline"},
    {"compare", "hook", "loading"},
    {"mmspec"},
    {"training"},
    {"cli"},
    {"serving"},
    {"__main__"},
]
"""Rooms of ``mmspec``: each imports from earlier layers only. ``mmspec`` is the package itself, the public API."""

COMMANDS = {"cli", "serving", "eval", "demos", "__main__"}
"""Rooms and packages that may import ``mmspec.cli``."""

FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if not path.is_symlink()]


def place(name: str) -> tuple[str, str] | None:
    """Package and room of an imported name; None for what is not ours. The room of a package itself is its name."""
    parts = name.split(".")
    if parts[0] != "mmspec":
        return ("tests", "tests") if parts[0] == "tests" else None
    if parts[1:2] and parts[1] in PACKAGES:
        parts = parts[1:]
    folder = ROOT / parts[0]
    is_room = len(parts) > 1 and ((folder / parts[1]).is_dir() or (folder / f"{parts[1]}.py").exists())
    return parts[0], parts[1] if is_room else parts[0]


def home(path: Path) -> tuple[str, str]:
    """Package and room of a file."""
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    return package, package if rest == ["__init__"] else rest[0]


def rooms(package: str) -> dict[str, set[str]]:
    """The rooms of a package, and which rooms each imports."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        where, room = home(path)
        if where == package:
            targets = [place(name) for name in imported(path.read_text())]
            found.setdefault(room, set()).update(to[1] for to in targets if to and to[0] == package and to[1] != room)
    return found


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for path in FILES:
        package, room = home(path)
        for name in imported(path.read_text()):
            to = place(name)
            command = to == ("mmspec", "cli") and not {package, room, path.stem} & COMMANDS
            if command or (to and to[0] not in {package, *PACKAGES[package]}):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_rooms_have_no_circles() -> None:
    for package in PACKAGES:
        assert list(TopologicalSorter(rooms(package)).static_order())


def test_files_have_no_circles() -> None:
    """Imports for type checkers, and those within functions, count too."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    names = {name if name.startswith("mmspec") else f"mmspec.{name}": path for name, path in names.items()}
    files = {}
    for name, path in names.items():
        found = list(imported(path.read_text(), for_checkers=True))
        files[name] = {
            next((part for part in (one, one.rpartition(".")[0]) if part in names), name) for one in found
        } - {name}
    assert list(TopologicalSorter(files).static_order())


LARGEST = {"modules": 319, "lines": 51_850, "lines of tests": 53_500}
"""What the project has grown to. Lower a number when it can be lowered; raise one only for a feature of users."""


def test_the_project_does_not_grow() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if not path.is_symlink()]
    lines, tested = (sum(path.read_text().count("\n") for path in paths) for paths in (FILES, tests))
    size = {"modules": len(FILES), "lines": lines, "lines of tests": tested}
    assert {name: size[name] for name in size if size[name] > LARGEST[name]} == {}


def test_rooms_of_the_core_import_from_lower_layers_only() -> None:
    level = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    found = rooms("mmspec")
    assert set(level) == set(found)
    assert [(room, to) for room, imports in found.items() for to in imports if level[to] >= level[room]] == []


def test_circles_and_imports_are_noticed() -> None:
    source = """
import mmspec.vision.images as images
from mmspec.ssm.scan import tree_scan
if TYPE_CHECKING:
    from mmspec.engine import engine
else:
    from mmspec import errors
def later():
    from mmspec.eval import speed
    importlib.import_module("mmspec.demos.web")
"""
    names = set(imported(source))
    assert {to[0] for name in names if (to := place(name))} == {"vision", "ssm", "mmspec", "eval", "demos"}
    assert place("mmspec.errors.UserError") == place("mmspec.errors") == ("mmspec", "errors")
    assert "mmspec.engine.engine" not in names
    with pytest.raises(CycleError):
        list(TopologicalSorter({"cache": {"targets"}, "targets": {"cache"}}).static_order())


def test_packages_of_a_user_do_no_harm(tmp_path: Path) -> None:
    """A script's own packages may be called as our folders are."""
    for name in PACKAGES.keys() - {"mmspec"}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a package of the user')")
    (tmp_path / "script.py").write_text("import mmspec; print(mmspec.load('tiny-llava', drafter=None).model.device)")
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-W", "ignore", "script.py"], **options)  # type: ignore[call-overload]
    assert (done.returncode, done.stdout) == (0, "cpu\n"), done.stderr
