"""Free answers about images and videos: MM-Vet, LLaVA-Bench, VideoDetailCaption, and the MMSpec benchmark.

Their own judges are large models. Here an answer's overlap with the reference stands in for them: it tells whether
methods differ, not how good a model is.
"""

from __future__ import annotations

from eval.harness.prompts import Conversation
from eval.suite.sample import Sample
from eval.suite.scoring.words import overlap
from eval.suite.tasks.local import Row
from eval.suite.tasks.remote import Hub
from eval.suite.tasks.task import Task, one_turn


def _mmvet(row: Row) -> Sample:
    return one_turn(row, str(row["question"]), [str(row["answer"])], str(row.get("capability", "")))


def _llava_bench(row: Row) -> Sample:
    return one_turn(row, str(row["question"]), [str(row["gpt_answer"])], str(row.get("category", "")))


def _video_detail(row: Row) -> Sample:
    question = str(row.get("question", "Describe the video in detail."))
    clip = row.videos("video") or row.videos("video_name")
    return Sample(row.id, Conversation((question,), videos=clip), "", ((str(row["answer"]),),))


def _benchmark(row: Row) -> Sample:
    turns = tuple(row.texts("turns"))
    return Sample(row.id, Conversation(turns, row.images("image")), str(row.get("category", "")))


TASKS = (
    Task(
        "mm-vet",
        "MM-Vet; image, question, answer, capability",
        True,
        overlap,
        256,
        _mmvet,
        Hub("lmms-lab-encoder/MMVet", "test"),
    ),
    Task(
        "llava-bench",
        "LLaVA-Bench (in the wild); image, question, gpt_answer, category",
        True,
        overlap,
        512,
        _llava_bench,
        Hub("lmms-lab-encoder/llava-bench-in-the-wild", "train"),
    ),
    Task(
        "video-detail",
        "VideoDetailCaption; video_name, question, answer",
        True,
        overlap,
        512,
        _video_detail,
    ),
    Task(
        "mmspec-benchmark",
        "The MMSpec benchmark (arXiv 2603.14989), another thing than this package; id, image, turns, category, topic",
        True,
        None,
        512,
        _benchmark,
    ),
)
