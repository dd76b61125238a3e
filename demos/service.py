"""Questions in, answers out: what the page and the named endpoints share."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from demos.models import Models
from demos.questions import MODELS, Question
from demos.runs import Race, Run, follow, race
from mmspec.errors import UserError

_log = logging.getLogger("mmspec.demo")


class Service:
    """Answers questions, one at a time.

    Args:
        models: where the models come from.
    """

    def __init__(self, models: Models) -> None:
        self.models = models

    def answer(self, question: Question) -> Iterator[Run]:
        """The answer, as it grows. Raises ``UserError``; anything else that goes wrong is told as one, too."""
        return self.models.one_at_a_time(_told(self._answer(question)))

    def race(self, question: Question) -> Iterator[Race]:
        """The answer of plain and of speculative decoding, as they grow; see ``answer``."""
        return self.models.one_at_a_time(_told(self._race(question)))

    def _answer(self, question: Question) -> Iterator[Run]:
        question, request, keywords = _ready(question)
        loaded = self.models.get(question.model)
        pipe = loaded.pipeline(question.drafter)
        yield from follow(pipe, loaded.label(question.drafter), request, keywords)

    def _race(self, question: Question) -> Iterator[Race]:
        question, request, keywords = _ready(question)
        yield from race(self.models.get(question.model), question.drafter, request, keywords)


def _ready(question: Question) -> tuple[Question, dict, dict]:
    """The question with its names filled in, its request and its keywords."""
    model, drafter = question.model.strip() or MODELS[question.kind], question.drafter.strip() or "auto"
    return replace(question, model=model, drafter=drafter), question.request(), question.keywords()


def _told(work: Iterator) -> Generator[Any, None, None]:
    """The same, with every failure as one line for the page; details of ours go to the log."""
    try:
        yield from work
    except UserError:
        raise
    except Exception as error:
        _log.exception("a request failed")
        raise UserError(f"something went wrong here ({type(error).__name__}); the server's log says what") from error
