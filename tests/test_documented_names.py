"""What CONTRIBUTING.md and docs/design.md name in backticks exists: paths, modules, classes, functions, commands."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from contextlib import suppress
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
MEMBERS = {"model": GenerationMixin, "pipe": mmspec.Pipeline}
SPAN = re.compile(r"`([^`]+)`")
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w.-]+\.(?:json|py|safetensors|toml)")
CALL = re.compile(r"([\w.]+)\(([\w, ]*)\)")
# `One` and `Other` in `path`, `One` (`path`
PLACED = re.compile(r"((?:`[\w.]+`(?:, | and )?)+)\s+(?:in |\()`([\w./-]+/[\w./-]+)`")


@cache
def defined(place: str = "") -> dict[str, list[set[str]]]:
    """Names that files define, dotted ones of classes' members included, with the parameters of each function.

    Args:
        place: a file or a folder; all sources if empty.
    """
    found: dict[str, list[set[str]]] = defaultdict(list)
    for root in [place] if place else SOURCES:
        path = ROOT / root
        for file in [path] if path.is_file() else path.rglob("*.py"):
            found[file.parent.name if file.stem == "__init__" else file.stem] += []
            for name, parameters in _names(ast.parse(file.read_text())):
                found[name] += parameters
    return found


def _names(tree: ast.AST, owner: str = "") -> list[tuple[str, list[set[str]]]]:
    found: list[tuple[str, list[set[str]]]] = []
    for node in ast.iter_child_nodes(tree):
        name, parameters = getattr(node, "name", None), []
        if isinstance(node, ast.FunctionDef):
            parameters = [{argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}]
            found += [(owner, parameters)] if name == "__init__" else []
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            name = node.arg
        if isinstance(name, str):
            found += [(name, parameters), (f"{owner}.{name}", parameters)]
        found += _names(node, str(name) if isinstance(node, ast.ClassDef) else owner)
    return found


def exists(path: str) -> bool:
    """Whether a path exists: from the root, or a single name anywhere; NAME stands for any."""
    pattern = path.strip("/").replace("NAME", "*")
    return any(any((ROOT / place).rglob(pattern)) for place in SOURCES) or any(ROOT.glob(pattern))


def is_known(name: str, place: str = "") -> bool:
    """Whether a bare or dotted name exists."""
    if name in defined(place) or name.removeprefix("mmspec.") in GROUPS or (ROOT / name).is_dir():
        return True
    head, _, last = name.rpartition(".")
    if not head:
        return name == name.lower() and find_spec(name) is not None
    head = {"kernels": "mmspec.ops.kernels"}.get(head, head)  # in code, by its last part
    with suppress(ImportError):
        return hasattr(MEMBERS.get(head) or import_module(head), last) or find_spec(name) is not None
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
    if (called := CALL.fullmatch(span)) and called[2]:
        given = {part.strip() for part in called[2].split(",")}
        return [] if any(given <= known for known in defined().get(called[1], ())) else [span]
    missing = []
    for word in (word.rpartition("=")[2].strip("()") for word in words):
        if PATH.fullmatch(word):
            missing += [] if exists(word) else [word]
        elif re.fullmatch(r"[A-Za-z_][\w.]*", word) and word not in ("True", "False"):
            missing += [] if is_known(word) else [word]
        elif re.fullmatch(r"\w+-\w+", word):
            missing += [] if word in {entry.name for entry in registered("models")} else [word]
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_names_in_backticks_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    prose = re.sub(r"^```.*?^```$|^(?: {4}|\|)[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [name for span in SPAN.findall(prose) for name in unknown(" ".join(span.split()))] == []
    placed = PLACED.findall(text)
    assert [(one, path) for given, path in placed for one in SPAN.findall(given) if not is_known(one, path)] == []


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
