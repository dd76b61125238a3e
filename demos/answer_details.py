"""Details of a finished answer: the draft tree of each verify pass, and plots."""

from __future__ import annotations

from dataclasses import dataclass

from demos.plots import histogram, time_split
from demos.streaming import StreamedAnswer
from mmspec.engine.stats import Stats
from mmspec.speculation.picture import draw_tree
from mmspec.speculation.trace import JudgedTree


@dataclass(frozen=True)
class AnswerDetails:
    """Draft trees and statistics of a finished answer, without references to the model.

    Attributes:
        steps: the verified trees.
        texts: text of each of their tokens.
        stats: the answer's statistics.
    """

    steps: list[JudgedTree]
    texts: dict[int, str]
    stats: Stats

    @property
    def best_step(self) -> int:
        """The pass, counted from 1, with the longest accepted path."""
        return 1 + max(range(len(self.steps)), key=lambda i: len(self.steps[i].path), default=0)


def answer_details(answer: StreamedAnswer) -> AnswerDetails | None:
    """Returns the details of a finished answer, or None if nothing was drafted."""
    if answer.stats is None or not answer.steps:
        return None
    seen = {token for step in answer.steps for token in (*step.tokens, step.bonus)}
    return AnswerDetails(answer.steps, {token: answer.token_text([token]) for token in seen}, answer.stats)


def tree_html(details: AnswerDetails | None, number: int) -> str:
    """The draft tree of a pass, counted from 1; empty if there is none."""
    if details is None or not 1 <= number <= len(details.steps):
        return ""
    picture = draw_tree(details.steps[number - 1], lambda ids: details.texts[ids[0]])
    return f'<div class="mm-scroll" tabindex="0" aria-label="Draft tree of pass {number}">{picture}</div>'


def plots_html(details: AnswerDetails) -> str:
    """Plots of accepted draft tokens and of time."""
    return f'<div class="mm-plots">{histogram(details.stats.acceptance_histogram)}{time_split(details.stats)}</div>'
