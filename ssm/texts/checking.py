"""Scores answers to examples. Generated programs run in a sandbox: restricted syntax and functions, and a bounded
number of executed lines."""

from __future__ import annotations

import ast
import re
import sys
from types import FrameType
from typing import Any

from mmspec.ssm.texts import problems, stories
from mmspec.ssm.texts.examples import TextExample


def correct(example: TextExample, text: str) -> bool:
    """Returns whether an answer to the example's prompt is correct in any wording.

    Problems and questions: the last line "Answer: ..." is compared. Sums: every result. Stories and rooms: every note
    must be mentioned. Programs: the function's outputs, and the traced answer if there is one.
    """
    if example.kind == "problem":
        return problems.final(text) is not None and problems.final(text) == problems.final(example.answer)
    if example.kind == "sums":
        return _results(text) == _results(example.answer)
    if example.kind == "question":
        return _last(text) == _last(example.answer) is not None
    if example.kind == "program":
        return runs_right(example, text) and _last(text) == _last(example.answer)
    return not stories.missing(example.prompt, text)


def runs_right(example: TextExample, text: str) -> bool:
    """Returns whether the program in an answer has the same outputs as the example's program for a few lists."""
    expected = outputs(_code(example.answer))
    assert expected is not None
    return outputs(_code(text)) == expected


def _code(text: str) -> str:
    return text.strip().split("\n\n")[0]


def _last(text: str) -> str | None:
    answers = re.findall(r"^Answer: (.+?)\s*$", text, re.MULTILINE)
    return answers[-1] if answers else None


def _results(text: str) -> list[str]:
    """Each line's calculation and final result, without intermediate results."""
    return [" = ".join((line.split("=")[0].strip(), line.split("=")[-1].strip())) for line in text.strip().splitlines()]


ALLOWED = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.Expr),
    *(ast.For, ast.If, ast.IfExp, ast.Continue, ast.Name, ast.Load, ast.Store, ast.Constant, ast.List, ast.Tuple),
    *(ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.Call, ast.keyword, ast.Attribute, ast.Subscript),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.USub, ast.Not),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)
FUNCTIONS = {"sum": sum, "len": len, "max": max, "min": min}
METHODS = ("append",)
MAX_CONSTANT = 10_000
MAX_LINES = 2_000
INPUTS: tuple[list[int], ...] = ([3, 8, 5, 12, 6], [7], [], [10, 2, 9, 4, 15, 18, 1], [5, 5, 20, 14])


def outputs(source: str) -> list[Any] | None:
    """Returns the outputs of a program's only function for `INPUTS`; None if it is illegal, fails or runs too long."""
    try:
        tree = ast.parse(source)
        if not _allowed(tree):
            return None
        space: dict[str, Any] = {"__builtins__": FUNCTIONS}
        exec(compile(tree, "<generated>", "exec"), space)
        function = space[tree.body[0].name]  # type: ignore[attr-defined]
        return [_bounded(function, list(values)) for values in INPUTS]
    except Exception:  # a generated program may raise anything
        return None


def _allowed(tree: ast.Module) -> bool:
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return False
    return all(
        isinstance(node, ALLOWED)
        and not (isinstance(node, ast.Attribute) and node.attr not in METHODS)
        and not (
            isinstance(node, ast.Constant) and not (isinstance(node.value, int) and abs(node.value) < MAX_CONSTANT)
        )
        for node in ast.walk(tree)
    )


def _bounded(function: Any, argument: list[int]) -> Any:
    lines = 0

    def count(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines > MAX_LINES:
            raise RuntimeError("too many lines")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return function(argument)
    finally:
        sys.settrace(before)
