"""What CONTRIBUTING.md and docs/design.md name in backticks exists: paths, modules, classes, functions, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import GenerationMixin

import mmspec
from mmspec.plugins import registered
from mmspec.plugins.builtin import BUILTIN

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "docs/design.md")
SOURCES = ("mmspec", "vision", "ssm", "eval", "demos", "tests")
GROUPS = {*BUILTIN, "processors"}  # the latter of other packages
INSTANCES = {"model": GenerationMixin, "pipe": mmspec.Pipeline}
SPAN = re.compile(r"`([^`]+)`")
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w.-]+\.(?:json|py|safetensors|toml)")
CALL = re.compile(r"([\w.]+)\(([\w, ]*)\)")
# `One` and `Other` in `path`, `One` (`path`
PLACED = re.compile(r"((?:`[\w.]+`(?:, | and )?)+)\s+(?:in |\()`([\w./-]+/[\w./-]+)`")


class Names(ast.NodeVisitor):
    """Names that files define, with the parameters of functions.

    Attributes:
        defined: name to the parameters of each of its functions; other definitions have none.
        members: (class, name).
    """

    def __init__(self, files: Iterator[Path]) -> None:
        self.defined: dict[str, list[list[str]]] = {}
        self.members: set[tuple[str, str]] = set()
        self._classes: list[str] = []
        for file in files:
            self._define(file.parent.name if file.stem == "__init__" else file.stem)
            self.visit(ast.parse(file.read_text()))

    def _define(self, name: str, *parameters: list[str]) -> None:
        self.defined.setdefault(name, []).extend(parameters)
        self.members |= {(cls, name) for cls in self._classes[-1:]}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node.name)
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        parameters = [argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
        self._define(node.name, parameters)
        if node.name == "__init__":
            self.defined[self._classes[-1]].append(parameters)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self.defined.setdefault(node.arg, [])

    def visit_keyword(self, node: ast.keyword) -> None:
        self.defined.setdefault(node.arg or "", [])
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.attr)
        self.generic_visit(node)


@cache
def names(place: str = "") -> Names:
    """Names of a file, of a folder's files, or of all."""
    path = ROOT / place
    if path.is_file():
        return Names(iter([path]))
    return Names(
        file for part in ([path] if place else [ROOT / name for name in SOURCES]) for file in part.rglob("*.py")
    )


def exists(path: str) -> bool:
    """Whether a path exists: from the root, or a single name anywhere; NAME stands for any."""
    pattern = path.strip("/").replace("NAME", "*")
    found = ROOT.glob(pattern) if "/" in pattern else (p for s in SOURCES for p in (ROOT / s).rglob(pattern))
    return any(True for _ in found)


def is_defined(name: str, place: str = "", parameters: list[str] | None = None) -> bool:
    """Whether a dotted or bare name exists, as a function of these parameters if they are given."""
    if name.removeprefix("mmspec.") in GROUPS or (ROOT / name).is_dir():
        return True
    head, _, last = name.rpartition(".")
    known = names(place)
    if parameters:
        return any(parameters == [p for p in given if p in parameters] for given in known.defined.get(last, []))
    if not head:
        return last in known.defined or (name.islower() and find_spec(name) is not None)
    return (head, last) in known.members or _imports(name) or hasattr(INSTANCES.get(head), last)


def _imports(name: str) -> bool:
    head, _, last = name.rpartition(".")
    if name.startswith("kernels."):  # a module is named by its last part in the code
        head = "mmspec.ops.kernels"
    try:
        return hasattr(import_module(head), last) or find_spec(name) is not None
    except ImportError:
        return False


def unknown(span: str) -> list[str]:
    """What a span in backticks names and does not exist."""
    words = span.split()
    if words[0] == "make":
        return [] if re.search(rf"^{words[1]}\b.*:", (ROOT / "Makefile").read_text(), re.MULTILINE) else [span]
    if words[0] == "mmspec" and len(words) > 1:
        return [] if words[1] in BUILTIN["commands"] else [span]
    if group := re.fullmatch(r'\[project\.entry-points\."mmspec\.(.*)"\]', span):
        return [] if group[1] in GROUPS else [span]
    if span.startswith((".venv", "--")):
        return []
    if called := CALL.fullmatch(span):
        parameters = [part.strip() for part in called[2].split(",") if part.strip()]
        return [] if is_defined(called[1], parameters=parameters) else [span]
    missing = []
    for word in words:
        word = word.rpartition("=")[2].strip("()")
        if PATH.fullmatch(word):
            missing += [] if exists(word) else [word]
        elif re.fullmatch(r"[A-Za-z_][\w.]*", word) and word not in ("True", "False"):
            missing += [] if is_defined(word) else [word]
        elif re.fullmatch(r"\w+-\w+", word):
            missing += [] if word in {entry.name for entry in registered("models")} else [word]
    return missing


def spans(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```$|^(?: {4}|\|)[^\n]*$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return sorted({" ".join(span.split()) for span in SPAN.findall(text)})


@pytest.mark.parametrize("page", PAGES)
def test_names_in_backticks_exist(page: str) -> None:
    assert [name for span in spans(page) for name in unknown(span)] == []


@pytest.mark.parametrize("page", PAGES)
def test_names_are_defined_where_a_page_says(page: str) -> None:
    placed = PLACED.findall((ROOT / page).read_text())
    wrong = [(name, path) for given, path in placed for name in SPAN.findall(given) if not is_defined(name, path)]
    assert wrong == []


@pytest.mark.parametrize(
    "span",
    [
        "CapturedSteps",
        "mmspec/engine/motor.py",
        "mmspec.vision.decoding.Encoder",
        "TokenTree.log_prob",
        "commit(tree)",
        "make cake",
        "mmspec bake",
        "motor.json",
        '[project.entry-points."mmspec.motors"]',
    ],
)
def test_missing_names_are_found(span: str) -> None:
    assert unknown(span)
