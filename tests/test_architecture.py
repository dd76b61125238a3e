"""The arrows between the packages: ``demos, eval -> vision, ssm -> mmspec``; vision and ssm do not know each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "mmspec": set(),
    "vision": {"mmspec"},
    "ssm": {"mmspec"},
    "eval": {"mmspec", "vision", "ssm"},
    "demos": {"mmspec", "vision", "ssm"},
}
FILES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def imported(source: str, package: str) -> Iterator[str]:
    """Top-level names that a module imports anywhere, in functions and ``if TYPE_CHECKING`` too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield package if node.level else (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_follow_the_arrows(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    known = {*ALLOWED, "tests"}
    crossing = {name for name in imported(path.read_text(), package) if name in known and name != package}
    assert crossing <= ALLOWED[package]


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import mmspec.vision.images as images
from . import near
from mmspec.ssm.scan import tree_scan
def later():
    from mmspec.eval import speed
    importlib.import_module("demos.web")
"""
    assert set(imported(source, "mmspec")) == {"vision", "mmspec", "ssm", "eval", "demos"}
