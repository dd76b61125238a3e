"""Yes-or-no tasks: POPE, MME."""

from __future__ import annotations

from mmspec.eval.suite.sample import Sample
from mmspec.eval.suite.scoring.yes_no import mme, pope
from mmspec.eval.suite.tasks.local import DatasetRow
from mmspec.eval.suite.tasks.remote import lmms_lab
from mmspec.eval.suite.tasks.short_answers import SHORT_ANSWER
from mmspec.eval.suite.tasks.task import EvalTask, single_turn


def _pope(row: DatasetRow) -> Sample:
    return single_turn(row, f"{row['question']}{SHORT_ANSWER}", [str(row["answer"])], str(row.get("category", "")))


def _mme(row: DatasetRow) -> Sample:
    # MME asks two questions per image, and also scores both together.
    question = str(row["question"]).replace(" Please answer yes or no.", "") + SHORT_ANSWER
    return single_turn(row, question, [str(row["answer"])], str(row.get("category", "")), metadata=row.id)


_FIELDS = "image, question, answer (yes or no), category"
TASKS = (
    EvalTask("pope", f"POPE; {_FIELDS}", True, pope, 16, _pope, lmms_lab("POPE", "test")),
    EvalTask("mme", f"MME; {_FIELDS}", True, mme, 16, _mme, lmms_lab("MME", "test")),
)
