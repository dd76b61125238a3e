"""Scores answers to examples."""

from __future__ import annotations

import re

from mmspec.ssm.texts import problems, running, stories
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
    expected = running.outputs(_code(example.answer))
    assert expected is not None
    return running.outputs(_code(text)) == expected


def _code(text: str) -> str:
    return text.strip().split("\n\n")[0]


def _last(text: str) -> str | None:
    answers = re.findall(r"^Answer: (.+?)\s*$", text, re.MULTILINE)
    return answers[-1] if answers else None


def _results(text: str) -> list[str]:
    """Each line's calculation and final result, without intermediate results."""
    return [" = ".join((line.split("=")[0].strip(), line.split("=")[-1].strip())) for line in text.strip().splitlines()]
