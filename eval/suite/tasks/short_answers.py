"""Questions answered in a word or a few: VQAv2, GQA, TextVQA, VizWiz, ChartQA, DocVQA, ActivityNet-QA, MSVD-QA."""

from __future__ import annotations

from collections.abc import Callable

from eval.suite.sample import Sample, Scorer
from eval.suite.scoring.words import anls, contained, exact, relaxed, vqa_accuracy
from eval.suite.tasks.local import Row
from eval.suite.tasks.remote import Hub
from eval.suite.tasks.task import Task, one_turn

SHORTLY = "\nAnswer the question using a single word or phrase."  # as LLaVA-1.5 asks (arXiv 2310.03744, section 3.2)


def _accepted(row: Row, field: str) -> list[str]:
    """Texts, or VQAv2's objects that hold one each."""
    value = row[field]
    if isinstance(value, list):
        return [str(one["answer"] if isinstance(one, dict) else one) for one in value]
    return [str(value)]


def _reader(field: str, category: str) -> Callable[[Row], Sample]:
    def read(row: Row) -> Sample:
        return one_turn(row, str(row["question"]) + SHORTLY, _accepted(row, field), str(row.get(category, "")))

    return read


def _task(name: str, about: str, score: Scorer, hub: Hub, field: str = "answer", category: str = "") -> Task:
    fields = f"image, question, {field}"
    return Task(name, f"{about}; {fields}", True, score, 32, _reader(field, category), hub)


def _about_a_video(row: Row) -> Sample:
    question = str(row["question"]).strip().capitalize().rstrip("?") + "?" + SHORTLY
    sample = one_turn(row, question, _accepted(row, "answer"), str(row.get("type", "")))
    clip = row.videos("video") or row.videos("video_name")
    return Sample(sample.id, type(sample.conversation)((question,), videos=clip), sample.category, sample.references)


def _video_task(name: str, about: str) -> Task:
    # The hub's rows only name the videos, which are to be had elsewhere.
    return Task(name, f"{about}; video_name, question, answer", True, contained, 32, _about_a_video)


TASKS = (
    _task("vqav2", "VQAv2", vqa_accuracy, Hub("lmms-lab-encoder/VQAv2", "validation"), "answers", "question_type"),
    _task(
        "gqa",
        "GQA, test-dev balanced",
        exact,
        Hub(
            "lmms-lab-encoder/GQA",
            "testdev",
            "testdev_balanced_instructions",
            ("testdev_balanced_images", "imageId"),
        ),
    ),
    _task("textvqa", "TextVQA", vqa_accuracy, Hub("lmms-lab-encoder/textvqa", "validation"), "answers"),
    _task("vizwiz", "VizWiz-VQA", vqa_accuracy, Hub("lmms-lab-encoder/VizWiz-VQA", "val"), "answers", "category"),
    _task("chartqa", "ChartQA", relaxed, Hub("lmms-lab-encoder/ChartQA", "test"), "answer", "type"),
    _task("docvqa", "DocVQA", anls, Hub("lmms-lab-encoder/DocVQA", "validation", "DocVQA"), "answers"),
    _video_task("activitynet-qa", "ActivityNet-QA"),
    _video_task("msvd-qa", "MSVD-QA"),
)
