"""Short-answer tasks: VQAv2, GQA, TextVQA, VizWiz, ChartQA, DocVQA, ActivityNet-QA, MSVD-QA."""

from __future__ import annotations

from collections.abc import Callable

from mmspec.eval.harness.prompts import Conversation
from mmspec.eval.suite.sample import Sample, Scorer
from mmspec.eval.suite.scoring.words import anls, contained, exact, relaxed, vqa_accuracy
from mmspec.eval.suite.tasks.local import DatasetRow
from mmspec.eval.suite.tasks.remote import HubDataset, lmms_lab
from mmspec.eval.suite.tasks.task import EvalTask, single_turn

SHORT_ANSWER = "\nAnswer the question using a single word or phrase."  # LLaVA-1.5 (arXiv 2310.03744, 3.2)


def _references(row: DatasetRow, field: str) -> list[str]:
    """Accepted answers: texts, or VQAv2's objects with an ``answer`` each."""
    value = row[field]
    if isinstance(value, list):
        return [str(entry["answer"] if isinstance(entry, dict) else entry) for entry in value]
    return [str(value)]


def _reader(field: str, category: str) -> Callable[[DatasetRow], Sample]:
    def read(row: DatasetRow) -> Sample:
        return single_turn(
            row, str(row["question"]) + SHORT_ANSWER, _references(row, field), str(row.get(category, ""))
        )

    return read


def _task(
    name: str, description: str, score: Scorer, hub: HubDataset, field: str = "answer", category: str = ""
) -> EvalTask:
    fields = f"image, question, {field}"
    return EvalTask(name, f"{description}; {fields}", True, score, 32, _reader(field, category), hub)


def _video_sample(row: DatasetRow) -> Sample:
    question = str(row["question"]).strip().capitalize().rstrip("?") + "?" + SHORT_ANSWER
    clip = row.videos("video") or row.videos("video_name")
    references = (tuple(_references(row, "answer")),)
    return Sample(row.id, Conversation((question,), videos=clip), str(row.get("type", "")), references)


def _video_task(name: str, description: str) -> EvalTask:
    # The hub's rows only name the videos, which must be downloaded elsewhere.
    return EvalTask(name, f"{description}; video_name, question, answer", True, contained, 32, _video_sample)


TASKS = (
    _task("vqav2", "VQAv2", vqa_accuracy, lmms_lab("VQAv2", "validation"), "answers", "question_type"),
    _task(
        "gqa",
        "GQA, test-dev balanced",
        exact,
        lmms_lab("GQA", "testdev", "testdev_balanced_instructions", ("testdev_balanced_images", "imageId")),
    ),
    _task("textvqa", "TextVQA", vqa_accuracy, lmms_lab("textvqa", "validation"), "answers"),
    _task("vizwiz", "VizWiz-VQA", vqa_accuracy, lmms_lab("VizWiz-VQA", "val"), "answers", "category"),
    _task("chartqa", "ChartQA", relaxed, lmms_lab("ChartQA", "test"), "answer", "type"),
    _task("docvqa", "DocVQA", anls, lmms_lab("DocVQA", "validation", "DocVQA"), "answers"),
    _video_task("activitynet-qa", "ActivityNet-QA"),
    _video_task("msvd-qa", "MSVD-QA"),
)
