"""Open-ended tasks on images and videos: MM-Vet, LLaVA-Bench, VideoDetailCaption, and the MMSpec benchmark.

Their official scores come from large judge models. Here the score is the overlap with the reference, which shows
whether methods differ, not how good a model is.
"""

from __future__ import annotations

from mmspec.eval.harness.prompts import Conversation
from mmspec.eval.suite.sample import Sample
from mmspec.eval.suite.scoring.words import rouge_l
from mmspec.eval.suite.tasks.local import DatasetRow
from mmspec.eval.suite.tasks.remote import lmms_lab
from mmspec.eval.suite.tasks.task import EvalTask, single_turn


def _mmvet(row: DatasetRow) -> Sample:
    return single_turn(row, str(row["question"]), [str(row["answer"])], str(row.get("capability", "")))


def _llava_bench(row: DatasetRow) -> Sample:
    return single_turn(row, str(row["question"]), [str(row["gpt_answer"])], str(row.get("category", "")))


def _video_detail(row: DatasetRow) -> Sample:
    question = str(row.get("question", "Describe the video in detail."))
    clip = row.videos("video") or row.videos("video_name")
    return Sample(row.id, Conversation((question,), videos=clip), "", ((str(row["answer"]),),))


def _benchmark(row: DatasetRow) -> Sample:
    turns = tuple(row.texts("turns"))
    return Sample(row.id, Conversation(turns, row.images("image")), str(row.get("category", "")))


TASKS = (
    EvalTask(
        "mm-vet", "MM-Vet; image, question, answer, capability", True, rouge_l, 256, _mmvet, lmms_lab("MMVet", "test")
    ),
    EvalTask(
        "llava-bench",
        "LLaVA-Bench (in the wild); image, question, gpt_answer, category",
        True,
        rouge_l,
        512,
        _llava_bench,
        lmms_lab("llava-bench-in-the-wild", "train"),
    ),
    EvalTask("video-detail", "VideoDetailCaption; video_name, question, answer", True, rouge_l, 512, _video_detail),
    EvalTask(
        "mmspec-benchmark",
        "The MMSpec benchmark (arXiv 2603.14989), unrelated to this package; id, image, turns, category, topic",
        True,
        None,
        512,
        _benchmark,
    ),
)
