"""Image captioning tasks: COCO, Flickr30k, NoCaps."""

from __future__ import annotations

from collections.abc import Callable

from mmspec.eval.suite.sample import Sample
from mmspec.eval.suite.scoring.captions import cider
from mmspec.eval.suite.tasks.local import DatasetRow
from mmspec.eval.suite.tasks.remote import HubDataset, lmms_lab
from mmspec.eval.suite.tasks.task import EvalTask, single_turn

_PROMPT = "Provide a one-sentence caption for the provided image."  # the prompt of LLaVA-1.5 and lmms-eval


def _reader(field: str) -> Callable[[DatasetRow], Sample]:
    return lambda row: single_turn(row, _PROMPT, row.texts(field))


def _task(name: str, description: str, field: str, hub: HubDataset) -> EvalTask:
    return EvalTask(name, f"{description}; image, {field} (list of captions)", True, cider, 64, _reader(field), hub)


TASKS = (
    _task("coco", "COCO captions 2017", "answer", lmms_lab("COCO-Caption2017", "val")),
    _task("flickr30k", "Flickr30k captions", "caption", lmms_lab("flickr30k", "test")),
    _task("nocaps", "NoCaps", "annotations_captions", lmms_lab("NoCaps", "validation")),
)
