"""Questions in, answers out: what the page and the named endpoints share."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from demos.models import Models
from demos.offer import Offer
from demos.questions import Kind, Question
from demos.runs import Race, Run, follow, race
from demos.storage import Uploads
from mmspec.errors import UserError

_log = logging.getLogger("mmspec.demo")


class Service:
    """Answers questions, one at a time.

    Args:
        models: where the models come from.
        offer: the names that a question may give.
        uploads: the only files that a question may bring.
    """

    def __init__(self, models: Models, offer: Offer, uploads: Uploads) -> None:
        self.models = models
        self.offer = offer
        self.uploads = uploads

    def answer(self, question: Question) -> Iterator[Run]:
        """The answer, as it grows. Raises ``UserError``; anything else that goes wrong is told as one, too."""
        return self.models.one_at_a_time(_told(self._answer(question)))

    def race(self, question: Question) -> Iterator[Race]:
        """The answer of plain and of speculative decoding, as they grow; see ``answer``."""
        return self.models.one_at_a_time(_told(self._race(question)))

    def _answer(self, question: Question) -> Iterator[Run]:
        question, request, keywords = self._ready(question)
        loaded = self.models.get(question.model)
        pipe = loaded.pipeline(question.drafter)
        yield from follow(pipe, loaded.label(question.drafter), request, keywords)

    def _race(self, question: Question) -> Iterator[Race]:
        question, request, keywords = self._ready(question)
        yield from race(self.models.get(question.model), question.drafter, request, keywords)

    def named(self, question: Question) -> Question:
        """The question with its model and drafter filled in.

        Raises:
            UserError: one of them is not offered.
        """
        model = question.model.strip() or self.offer.model_for(question.kind)
        drafter = question.drafter.strip() or "auto"
        self.offer.check(model, drafter)
        return replace(question, model=model, drafter=drafter)

    def _ready(self, question: Question) -> tuple[Question, dict, dict]:
        """The question with its names filled in, its request and its keywords."""
        question = self.named(question)
        if question.upload is not None:
            if not self.uploads.holds(question.upload.path):
                raise not_uploaded(question.kind)
            self.uploads.use(question.upload.path)
        return question, question.request(), question.keywords()


def not_uploaded(kind: Kind) -> UserError:
    """The error for a file that was not sent to this server."""
    return UserError(f"the {kind} must be uploaded: expected gradio_client's handle_file(PATH)")


def _told(work: Iterator) -> Generator[Any, None, None]:
    """The same, with every failure as one line for the page; details of ours go to the log."""
    try:
        yield from work
    except UserError:
        raise
    except Exception as error:
        _log.exception("a request failed")
        raise UserError(f"something went wrong here ({type(error).__name__}); the server's log says what") from error
