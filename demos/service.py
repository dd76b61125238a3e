"""Answer requests; shared by the page and the API endpoints."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from demos.catalog import Catalog
from demos.chat_request import ChatRequest, Kind
from demos.models import ModelCache
from demos.storage import UploadFolder
from demos.streaming import Race, StreamedAnswer, race, stream_answer
from mmspec.errors import UserError

_log = logging.getLogger("mmspec.demo")


class Service:
    """Answers requests: together, but for races.

    Args:
        models: cache of loaded models.
        catalog: models and drafters that a request may name.
        uploads: folder that a request's file must be in.
    """

    def __init__(self, models: ModelCache, catalog: Catalog, uploads: UploadFolder) -> None:
        self.models = models
        self.catalog = catalog
        self.uploads = uploads

    def answer(self, chat: ChatRequest) -> Iterator[StreamedAnswer]:
        """Stream an answer. All errors are raised as ``UserError``."""
        return self.models.in_turn(_user_errors(self._answer(chat)), StreamedAnswer(chat.model, chat.drafter))

    def race(self, chat: ChatRequest) -> Iterator[Race]:
        """Stream a race of speculative and plain decoding, while no other request runs; see ``answer``."""
        waiting = Race(StreamedAnswer(chat.model, chat.drafter), StreamedAnswer(chat.model, "none"), waiting=True)
        return self.models.in_turn(_user_errors(self._race(chat)), waiting, alone=True)

    def _answer(self, chat: ChatRequest) -> Iterator[StreamedAnswer]:
        chat, request, keywords = self._prepare(chat)
        yield from stream_answer(self.models.get(chat.model).pipeline(chat.drafter), request, keywords)

    def _race(self, chat: ChatRequest) -> Iterator[Race]:
        chat, request, keywords = self._prepare(chat)
        yield from race(self.models.get(chat.model), chat.drafter, request, keywords)

    def with_defaults(self, chat: ChatRequest) -> ChatRequest:
        """Fill in a request's default model and drafter.

        Raises:
            UserError: the model or drafter is not in the catalog.
        """
        model = chat.model.strip() or self.catalog.default_model(chat.kind)
        drafter = chat.drafter.strip() or "auto"
        self.catalog.check(model, drafter)
        return replace(chat, model=model, drafter=drafter)

    def _prepare(self, chat: ChatRequest) -> tuple[ChatRequest, dict, dict]:
        """The request with its defaults, and the pipeline's request and keywords."""
        chat = self.with_defaults(chat)
        if chat.upload is not None:
            if not self.uploads.contains(chat.upload.path):
                raise not_uploaded_error(chat.kind)
            self.uploads.touch(chat.upload.path)
        return chat, chat.pipeline_request(), chat.generate_kwargs()


def not_uploaded_error(kind: Kind) -> UserError:
    """The error for a file that was not uploaded to this server."""
    return UserError(f"the {kind} must be uploaded: expected gradio_client's handle_file(PATH)")


def _user_errors(work: Iterator) -> Generator[Any, None, None]:
    """Log unexpected exceptions, and raise a ``UserError`` without details instead."""
    try:
        yield from work
    except UserError:
        raise
    except Exception as error:
        _log.exception("a request failed")
        raise UserError(f"internal error ({type(error).__name__}); details are in the server's log") from error
