"""Imports between packages and between the rooms of a package: arrows without circles.

A room is a folder of a package, or a single module. Imports for type checkers only are exempt.
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

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
    {"errors"},
    {"files", "http_client", "progress", "validation", "workers"},
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
    {"checking", "training"},
    {"cli"},
    {"serving"},
    {"__main__"},
]
"""Rooms of ``mmspec``: each imports from earlier layers only. ``mmspec`` is the package itself, the public API."""

COMMANDS = {"cli", "serving", "eval", "demos", "__main__"}
"""Rooms and packages that may import ``mmspec.cli``."""

LARGEST = {"modules": 243, "lines": 55_890, "lines of tests": 53_400}
"""Size of the project. Lower a number when possible; raise one only for a users' feature."""

FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if not path.is_symlink()]


def place(name: str) -> tuple[str, str] | None:
    """Package and room of an imported name; None for other projects. The room of a package itself is its name."""
    parts = name.split(".")
    if parts[0] in PACKAGES and parts[0] != "mmspec":  # a user's own package may be called so
        return "tests", name
    if parts[0] != "mmspec":
        return ("tests", "tests") if parts[0] == "tests" else None
    if parts[1:2] and parts[1] in PACKAGES:
        parts = parts[1:]
    folder = ROOT / parts[0]
    is_room = len(parts) > 1 and ((folder / parts[1]).is_dir() or (folder / f"{parts[1]}.py").exists())
    return parts[0], parts[1] if is_room else parts[0]


def test_imports_follow_the_arrows() -> None:
    wrong = []
    rooms: dict[str, dict[str, set[str]]] = {package: {} for package in PACKAGES}
    for path in FILES:
        package, *rest = path.relative_to(ROOT).with_suffix("").parts
        room = package if rest == ["__init__"] else rest[0]
        used = rooms[package].setdefault(room, set())
        for name in imported(path.read_text()):
            to = place(name)
            command = to == ("mmspec", "cli") and not {package, room, path.stem} & COMMANDS
            if command or (to and to[0] not in {package, *PACKAGES[package]}):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
            if to and to[0] == package and to[1] != room:
                used.add(to[1])
    assert wrong == []
    for found in rooms.values():
        assert list(TopologicalSorter(found).static_order())
    level = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    assert set(level) == set(rooms["mmspec"])
    assert [(room, to) for room, used in rooms["mmspec"].items() for to in used if level[to] >= level[room]] == []


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


FLOATING = {"empty", "zeros", "ones", "rand", "randn", "linspace", "logspace", "eye", "normal"}
"""Functions of torch whose results have the default dtype."""


def test_new_tensors_name_their_dtype() -> None:
    """The default dtype is the user's, and transformers changes it while another thread loads a model."""
    wrong = []
    for path in FILES:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            module, _, name = ast.unparse(call.func).rpartition(".")
            made = name in {*FLOATING, "tensor", "as_tensor", "scalar_tensor"}
            values = [ast.unparse(value) for value in call.args]
            if name == "full":  # of an integer, it is int64
                made = not values[1].lstrip("-").isdecimal()
            elif name == "arange":
                made = any("." in value and value.replace(".", "").isdecimal() for value in values)
            elif name == "where" and len(values) == 3:
                made = all(value.lstrip("-") == "torch.inf" or value[-1].isdecimal() for value in values[1:])
            if module == "torch" and made and "dtype" not in {keyword.arg for keyword in call.keywords}:
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}")
    assert wrong == []


def test_the_project_does_not_grow() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if not path.is_symlink()]
    lines, tested = (sum(path.read_text().count("\n") for path in paths) for paths in (FILES, tests))
    size = {"modules": len(FILES), "lines": lines, "lines of tests": tested}
    assert {name: size[name] for name in size if size[name] > LARGEST[name]} == {}
