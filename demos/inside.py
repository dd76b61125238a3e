"""A look inside a run: the tree of each of its passes, and its plots."""

from __future__ import annotations

from dataclasses import dataclass

from demos.plots import histogram, time_split
from demos.runs import Run
from mmspec.picture import draw_tree
from mmspec.stats import Stats
from mmspec.trace import JudgedTree


@dataclass(frozen=True)
class Inside:
    """What a visitor can look into, free of the model.

    Attributes:
        steps: the judged trees.
        texts: what their tokens read.
        stats: the run's figures.
    """

    steps: list[JudgedTree]
    texts: dict[int, str]
    stats: Stats

    @property
    def best(self) -> int:
        """The pass, counted from 1, that accepted most."""
        return 1 + max(range(len(self.steps)), key=lambda i: len(self.steps[i].path), default=0)


def inside_of(run: Run) -> Inside | None:
    """What can be looked into of a run that has ended; None where nothing was drafted."""
    if run.stats is None or not run.steps:
        return None
    seen = {token for step in run.steps for token in (*step.tokens, step.bonus)}
    return Inside(run.steps, {token: run.read([token]) for token in seen}, run.stats)


def step_html(inside: Inside | None, number: int) -> str:
    """The draft tree of a pass, counted from 1."""
    if inside is None or not 1 <= number <= len(inside.steps):
        return ""
    picture = draw_tree(inside.steps[number - 1], lambda ids: inside.texts[ids[0]])
    return f'<div class="mm-scroll" tabindex="0" aria-label="Draft tree of pass {number}">{picture}</div>'


def plots_html(inside: Inside) -> str:
    """Acceptance and time of the run."""
    return f'<div class="mm-plots">{histogram(inside.stats.acceptance_histogram)}{time_split(inside.stats)}</div>'
