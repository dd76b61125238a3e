"""Answer requests; shared by the page and the API endpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from mmspec.demos.catalog import FEWEST, Catalog, check_methods, drafter_of
from mmspec.demos.chat_request import ChatRequest, Kind
from mmspec.demos.models import ModelCache
from mmspec.demos.racing import Race, StreamedAnswer, race, resolved, stream_answer, warmed_up
from mmspec.demos.storage import PREVIEW_SPACE, UploadFolder, write_preview
from mmspec.errors import UserError

T = TypeVar("T")
_log = logging.getLogger("mmspec.demo")
_OPENING_RACES = 2  # maximum runs of an opening race


class Service:
    """Answers requests: several at once, races alone."""

    def __init__(self, models: ModelCache, catalog: Catalog, uploads: UploadFolder) -> None:
        self.models = models
        self.catalog = catalog
        self.uploads = uploads
        self._openings: dict[Kind, Race] = {}

    def answer(self, chat: ChatRequest) -> Iterator[StreamedAnswer]:
        """Stream an answer by ``chat.drafter``. All errors are raised as ``UserError``."""
        return self.models.turns.run(
            _user_errors(self._answer(chat)), lambda ahead: StreamedAnswer(chat.model, chat.drafter, ahead=ahead)
        )

    def race(self, chat: ChatRequest, methods: Sequence[str] | None = None) -> Iterator[Race]:
        """Stream a race of methods, by default the model's first two, while no other request runs; see ``answer``."""
        return self._alone(self._race(chat, methods))

    def _alone(self, races: Iterator[Race]) -> Iterator[Race]:
        return self.models.turns.run(_user_errors(races), lambda ahead: Race([], ahead=ahead), alone=True)

    def opening(self, chat: ChatRequest) -> Iterator[Race]:
        """The opening race of a tab: runs for the first visitor, and is cached for later visitors.

        A race without a speedup, for example on a busy machine, is repeated once.
        """
        if chat.kind in self._openings:
            yield self._openings[chat.kind]
        else:
            yield from self._alone(self._opening(chat))

    def _opening(self, chat: ChatRequest) -> Iterator[Race]:
        for number in range(_OPENING_RACES):
            if chat.kind in self._openings:  # cached for an earlier visitor
                break
            for result in self._race(chat, None):
                yield result
            if result.pays or number == _OPENING_RACES - 1:
                self._openings[chat.kind] = result
        yield self._openings[chat.kind]

    def warm_up(self, chat: ChatRequest) -> None:
        """Load the models of a race and run each method once, so that the race starts without delay."""
        chat, request = self._prepare(chat)
        warmed_up(self.models.get(chat.model), self._methods(chat), request, chat.generate_kwargs)

    def preview(self, upload: str, kind: Kind) -> str | None:
        """Write the preview of an upload; returns its path, or None if it does not fit into the space of uploads."""
        self._check_uploaded(upload, kind)
        if not self.uploads.reserve(PREVIEW_SPACE):
            return None
        try:
            return write_preview(upload, kind)
        finally:
            self.uploads.release(PREVIEW_SPACE)

    def _answer(self, chat: ChatRequest) -> Iterator[StreamedAnswer]:
        chat, request = self._prepare(chat)
        pipe = self.models.get(chat.model).pipeline(chat.drafter)
        yield from stream_answer(pipe, resolved(chat.drafter, pipe), request, chat.generate_kwargs)

    def _race(self, chat: ChatRequest, methods: Sequence[str] | None) -> Iterator[Race]:
        methods = self._methods(chat) if methods is None else methods
        check_methods(methods)
        for method in methods:
            self.with_defaults(replace(chat, drafter=drafter_of(method)))
        chat, request = self._prepare(chat)
        yield from race(self.models.get(chat.model), methods, request, chat.generate_kwargs)

    def _methods(self, chat: ChatRequest) -> list[str]:
        """Default methods of a race."""
        return self.catalog.methods(self.with_defaults(chat).model)[:FEWEST]

    def with_defaults(self, chat: ChatRequest) -> ChatRequest:
        """Fill in a request's default model and drafter, which must be in the catalog."""
        chat = replace(chat, model=chat.model or self.catalog.default_model(chat.kind), drafter=chat.drafter or "auto")
        self.catalog.check(chat.model, chat.drafter)
        return chat

    def _prepare(self, chat: ChatRequest) -> tuple[ChatRequest, dict[str, Any]]:
        """The request with its defaults, and the pipeline's request."""
        chat = self.with_defaults(chat)
        for upload in chat.uploads:
            self._check_uploaded(upload, chat.kind)
            with suppress(OSError):
                os.utime(upload)  # used now
        return chat, chat.pipeline_request()

    def _check_uploaded(self, upload: str, kind: Kind) -> None:
        if not self.uploads.contains(upload):
            raise UserError(f"the {kind} must be uploaded: expected gradio_client's handle_file(PATH)")


def _user_errors(work: Iterator[T]) -> Iterator[T]:
    """Log unexpected exceptions, and raise a ``UserError`` without details instead."""
    try:
        yield from work
    except UserError:
        raise
    except Exception as error:
        _log.exception("a request failed")
        raise UserError(f"internal error ({type(error).__name__}); details are in the server's log") from error
