"""The endpoints: OpenAI's, and vLLM's for tokens; and how they read requests' bodies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse

from mmspec.serving.disconnect import EventStream, unless_gone
from mmspec.serving.errors import APIError, as_api_error
from mmspec.serving.fields import F, parse
from mmspec.serving.formats import Format
from mmspec.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from mmspec.serving.requests import Requests
from mmspec.serving.response_request import ResponsesRequest
from mmspec.serving.runner import Runner, Work

_log = logging.getLogger("mmspec.serving")

R = TypeVar("R", bound=GenerationRequest)


class Endpoints:
    """The endpoints.

    Args:
        body_bytes: most bytes of a request's body.
        scrape: as for ``create_app``.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Requests,
        body_bytes: int,
        scrape: Callable[[], Awaitable[Collector]] | None = None,
    ) -> None:
        self._runner, self._requests, self._body_bytes, self._scrape = runner, requests, body_bytes, scrape

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, self._requests.chat)

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``: the prompts as they are, without a chat template."""
        return await self._answer(request, CompletionRequest, self._requests.completion)

    async def respond(self, request: Request) -> Response:
        return await self._answer(request, ResponsesRequest, self._requests.response)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        return await self._parsed(request, TokenizeRequest, self._requests.tokens)

    async def detokenize(self, request: Request) -> dict[str, Any]:
        return await self._parsed(request, DetokenizeRequest, self._requests.text)

    async def _parsed(self, request: Request, kind: type[F], use: Callable[[F], Any]) -> Any:
        """Parse a request's body, and call a function with it, in a thread: large ones take long."""
        content = await read_body(request, self._body_bytes)
        return await asyncio.to_thread(lambda: use(parse(kind, content)))

    async def health(self) -> Response:
        """Status 200; see ``mmspec.serving.drain`` for other times."""
        return Response()

    async def metrics(self) -> Response:
        """``GET /metrics``: Prometheus' text format."""
        found = self._runner.metrics.registry if self._scrape is None else await self._scrape()
        return Response(generate_latest(found), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, request: Request, kind: type[R], prepare: Callable[[R], tuple[Work, Format]]) -> Response:
        asked, (work, form) = await self._parsed(request, kind, lambda asked: (asked, prepare(asked)))
        receive = request.receive
        if not asked.stream:
            return JSONResponse(await unless_gone(receive, self._whole(work, form)))
        events = self._events(work, form)
        # The status must be that of errors before the first token.
        first = await unless_gone(receive, events.__anext__())
        return EventStream(first, events)

    async def _whole(self, work: Work, form: Format) -> dict[str, Any]:
        async with self._runner.start(work) as pieces:
            async for index, piece in pieces:
                form.answers[index].append(piece)
        return form.whole()

    async def _events(self, work: Work, form: Format) -> AsyncGenerator[bytes]:
        """Server-sent events; exceptions after the first one are events, too."""
        started = False
        try:
            async with self._runner.start(work) as pieces:
                async for index, piece in pieces:
                    if not started:
                        for chunk in form.first_chunks():
                            yield form.event(chunk)
                        started = True
                    for chunk in form.chunks(index, piece):
                        yield form.event(chunk)
        except Exception as error:
            if not started:
                raise
            found = as_api_error(error)
            if found.status >= 500:
                _log.error("a request failed", exc_info=error)
            for chunk in form.failed(found):
                yield form.event(chunk)
        yield form.end


BODY_SECONDS = 60.0
"""Time in which a body must arrive."""


async def read_body(request: Request, most: int) -> bytes:
    """A request's body.

    Args:
        most: bytes.

    Raises:
        APIError: it is too large, or takes too long.
    """
    error = APIError(413, f"a request's body must have at most {most} bytes: got more")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > most:
        raise error
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise error
    except TimeoutError:
        raise APIError(408, f"a request's body must arrive within {BODY_SECONDS:g} s") from None
    return bytes(body)
