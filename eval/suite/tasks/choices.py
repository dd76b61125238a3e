"""Multiple choice: AI2D, ScienceQA, MMMU."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from eval.harness.prompts import Conversation
from eval.suite.sample import Sample
from eval.suite.scoring.choice import choice
from eval.suite.tasks.local import Row
from eval.suite.tasks.remote import Hub
from eval.suite.tasks.task import Task, one_turn

_BY_LETTER = "\nAnswer with the option's letter from the given choices directly."  # as LLaVA-1.5 asks


def _lettered(options: Sequence[str]) -> str:
    return "\n".join(f"{chr(ord('A') + k)}. {option}" for k, option in enumerate(options))


def _letter(answer: object) -> str:
    """Of an index or of a letter."""
    return chr(ord("A") + int(answer)) if str(answer).isdecimal() else str(answer)  # type: ignore[call-overload]


def _ai2d(row: Row) -> Sample:
    options = row.texts("options")
    question = f"{row['question']}\n{_lettered(options)}{_BY_LETTER}"
    return one_turn(row, question, [_letter(row["answer"])], about=options)


def _scienceqa(row: Row) -> Sample:
    options = row.texts("choices")
    context = f"Context: {row['hint']}\n" if row.get("hint") else ""
    question = f"{context}{row['question']}\n{_lettered(options)}{_BY_LETTER}"
    return one_turn(row, question, [_letter(row["answer"])], str(row.get("subject", "")), about=options)


def _mmmu(row: Row) -> Sample:
    options = row.get("options", [])
    options = list(ast.literal_eval(options)) if isinstance(options, str) else list(options)
    question = str(row["question"])
    question += f"\n{_lettered(options)}{_BY_LETTER}" if options else "\nAnswer with a word, a phrase or a number."
    pictures = row.images(*(f"image_{k}" for k in range(1, 8)))
    answers = ast.literal_eval(row["answer"]) if str(row["answer"]).startswith("[") else row["answer"]
    references = tuple(map(str, answers)) if isinstance(answers, list) else (str(answers),)
    return Sample(row.id, Conversation((question,), pictures), str(row.get("subfield", "")), (references,), options)


TASKS = (
    Task(
        "ai2d",
        "AI2D; image, question, options, answer (index)",
        True,
        choice,
        16,
        _ai2d,
        Hub("lmms-lab-encoder/ai2d", "test"),
    ),
    Task(
        "scienceqa",
        "ScienceQA; image (or none), question, choices, answer (index), hint",
        True,
        choice,
        16,
        _scienceqa,
        Hub("lmms-lab-encoder/ScienceQA", "test", "ScienceQA-IMG"),
    ),
    Task(
        "mmmu",
        "MMMU; image_1 .. image_7, question, options, answer (letter or text)",
        True,
        choice,
        32,
        _mmmu,
        Hub("lmms-lab-encoder/MMMU", "validation"),
    ),
)
