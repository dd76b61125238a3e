"""Captioning: COCO, Flickr30k, NoCaps."""

from __future__ import annotations

from collections.abc import Callable

from eval.suite.sample import Sample
from eval.suite.scoring.captions import cider
from eval.suite.tasks.local import Row
from eval.suite.tasks.remote import Hub
from eval.suite.tasks.task import Task, one_turn

_PROMPT = "Provide a one-sentence caption for the provided image."  # as LLaVA-1.5 and lmms-eval ask


def _reader(field: str) -> Callable[[Row], Sample]:
    return lambda row: one_turn(row, _PROMPT, row.texts(field))


def _task(name: str, about: str, field: str, hub: Hub) -> Task:
    return Task(name, f"{about}; image, {field} (list of captions)", True, cider, 64, _reader(field), hub)


TASKS = (
    _task("coco", "COCO captions 2017", "answer", Hub("lmms-lab-encoder/COCO-Caption2017", "val")),
    _task("flickr30k", "Flickr30k captions", "caption", Hub("lmms-lab-encoder/flickr30k", "test")),
    _task("nocaps", "NoCaps", "annotations_captions", Hub("lmms-lab-encoder/NoCaps", "validation")),
)
