"""The embedded suite: held-out scenes, clips and texts of the kinds that the embedded models were trained on.

Its rows are in ``eval/heldout``, see ``mmspec.eval.harness.prompts``.
"""

from __future__ import annotations

from collections.abc import Iterator

from mmspec.eval.harness.prompts import held_out
from mmspec.eval.suite.sample import Sample, Scorer
from mmspec.eval.suite.scoring import choice_accuracy, contained, mentioned
from mmspec.eval.suite.tasks.task import EvalTask


def _task(name: str, description: str, score: Scorer, max_new_tokens: int = 160, visual: bool = True) -> EvalTask:
    def rows() -> Iterator[Sample]:
        for row, conversation in held_out(name):
            references = tuple(map(tuple, row.get("references", ())))
            yield Sample(row["id"], conversation, row["category"], references, row.get("parts", row.get("options")))

    return EvalTask(name, description, visual, score, max_new_tokens, rows=rows)


TASKS = (
    _task("scenes-captions", "drawn: captions of one image", mentioned),
    _task("scenes-questions", "drawn: questions about an image", contained, 64),
    _task("scenes-reading", "drawn: words and numbers on a sign", contained, 64),
    _task("scenes-counting", "drawn: counting questions", contained, 64),
    _task("scenes-charts", "drawn: bar charts, unknown to the embedded models", choice_accuracy, 64),
    _task("scenes-turns", "drawn: a caption, then two questions", contained),
    _task("scenes-images", "drawn: two or three images at once", mentioned),
    _task("scenes-video", "drawn: captions of clips", mentioned),
    _task("texts", "generated: sums, word problems, stories, programs", mentioned, 256, visual=False),
)
