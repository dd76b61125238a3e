"""Whether an answer to an example is right."""

from __future__ import annotations

import re

from ssm.texts import problems, running, stories
from ssm.texts.examples import Example


def correct(example: Example, text: str) -> bool:
    """Whether an answer to the example's prompt is right, however it is worded.

    Worked solutions and questions: the line "Answer: ..." at the end. Sums: every result. Stories and rooms: every note
    is told. Programs: the function gives what the example's own gives, and so does the traced answer if asked for.
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


def runs_right(example: Example, text: str) -> bool:
    """Whether the program in an answer runs and gives, for a few lists, what the example's own program gives."""
    wanted = running.outputs(_code(example.answer))
    assert wanted is not None
    return running.outputs(_code(text)) == wanted


def _code(text: str) -> str:
    return text.strip().split("\n\n")[0]


def _last(text: str) -> str | None:
    found = re.findall(r"^Answer: (.+?)\s*$", text, re.MULTILINE)
    return found[-1] if found else None


def _results(text: str) -> list[str]:
    """Each line's question and result, what stands between them left out."""
    return [" = ".join((line.split("=")[0].strip(), line.split("=")[-1].strip())) for line in text.strip().splitlines()]
