"""Scorers of captions of pictures; ``metadata`` is the ``Picture``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from mmspec.eval.pictures.judging import claimed_things, coloured_shapes
from mmspec.eval.pictures.picture import photograph_packages
from mmspec.eval.pictures.results import KIND, NAMED, SHAPES, THINGS, judge
from mmspec.eval.suite.sample import Answered


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
