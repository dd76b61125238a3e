"""Multiple-choice tasks: AI2D, ScienceQA, MMMU."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from mmspec.eval.harness.prompts import Conversation
from mmspec.eval.suite.sample import Sample
from mmspec.eval.suite.scoring.choice import choice_accuracy
from mmspec.eval.suite.tasks.local import DatasetRow
from mmspec.eval.suite.tasks.remote import HubDataset, lmms_lab
from mmspec.eval.suite.tasks.task import EvalTask, single_turn

_LETTER_PROMPT = "\nAnswer with the option's letter from the given choices directly."  # the prompt of LLaVA-1.5


def _list_options(options: Sequence[str]) -> str:
    return "\n".join(f"{chr(ord('A') + k)}. {option}" for k, option in enumerate(options))


def _letter(answer: object) -> str:
    """The letter of an option, given by index or letter."""
    return chr(ord("A") + int(answer)) if str(answer).isdecimal() else str(answer)  # type: ignore[call-overload]


def _ai2d(row: DatasetRow) -> Sample:
    options = row.texts("options")
    question = f"{row['question']}\n{_list_options(options)}{_LETTER_PROMPT}"
    return single_turn(row, question, [_letter(row["answer"])], metadata=options)


def _scienceqa(row: DatasetRow) -> Sample:
    options = row.texts("choices")
    context = f"Context: {row['hint']}\n" if row.get("hint") else ""
    question = f"{context}{row['question']}\n{_list_options(options)}{_LETTER_PROMPT}"
    return single_turn(row, question, [_letter(row["answer"])], str(row.get("subject", "")), metadata=options)


def _mmmu(row: DatasetRow) -> Sample:
    options = row.get("options", [])
    options = list(ast.literal_eval(options)) if isinstance(options, str) else list(options)
    prompt = f"{_list_options(options)}{_LETTER_PROMPT}" if options else "Answer with a word, a phrase or a number."
    question = f"{row['question']}\n{prompt}"
    images = row.images(*(f"image_{k}" for k in range(1, 8)))
    answers = ast.literal_eval(row["answer"]) if str(row["answer"]).startswith("[") else row["answer"]
    references = tuple(map(str, answers)) if isinstance(answers, list) else (str(answers),)
    return Sample(row.id, Conversation((question,), images), str(row.get("subfield", "")), (references,), options)


def _task(
    name: str, description: str, max_new_tokens: int, read: Callable[[DatasetRow], Sample], hub: HubDataset
) -> EvalTask:
    return EvalTask(name, description, True, choice_accuracy, max_new_tokens, read, hub)


_SCIENCEQA = "ScienceQA; image (or none), question, choices, answer (index), hint"
_MMMU = "MMMU; image_1 .. image_7, question, options, answer (letter or text)"
TASKS = (
    _task("ai2d", "AI2D; image, question, options, answer (index)", 16, _ai2d, lmms_lab("ai2d", "test")),
    _task("scienceqa", _SCIENCEQA, 16, _scienceqa, lmms_lab("ScienceQA", "test", "ScienceQA-IMG")),
    _task("mmmu", _MMMU, 32, _mmmu, lmms_lab("MMMU", "validation")),
)
