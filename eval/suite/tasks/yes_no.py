"""Yes or no: POPE, MME."""

from __future__ import annotations

from eval.suite.sample import Sample
from eval.suite.scoring.yes_no import mme, pope
from eval.suite.tasks.local import Row
from eval.suite.tasks.remote import Hub
from eval.suite.tasks.short_answers import SHORTLY
from eval.suite.tasks.task import Task, one_turn


def _pope(row: Row) -> Sample:
    return one_turn(row, f"{row['question']}{SHORTLY}", [str(row["answer"])], str(row.get("category", "")))


def _mme(row: Row) -> Sample:
    # MME asks two questions about each image; they count together, too.
    question = str(row["question"]).replace(" Please answer yes or no.", "") + SHORTLY
    return one_turn(row, question, [str(row["answer"])], str(row.get("category", "")), about=row.id)


_FIELDS = "image, question, answer (yes or no), category"
TASKS = (
    Task("pope", f"POPE; {_FIELDS}", True, pope, 16, _pope, Hub("lmms-lab-encoder/POPE", "test")),
    Task("mme", f"MME; {_FIELDS}", True, mme, 16, _mme, Hub("lmms-lab-encoder/MME", "test")),
)
