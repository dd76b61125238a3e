"""The endpoints: OpenAI's, and vLLM's for tokens; and how they read requests' bodies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import HTMLResponse, JSONResponse

from mmspec.serving.catalog import Catalog
from mmspec.serving.disconnect import EventStream, unless_gone
from mmspec.serving.drain import LIVE, READY
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
from mmspec.serving.stored import StoredResponses

_log = logging.getLogger("mmspec.serving")

R = TypeVar("R", bound=GenerationRequest)


def add_endpoints(
    app: FastAPI,
    runner: Runner,
    requests: Requests,
    catalog: Catalog,
    stored: StoredResponses,
    body_bytes: int,
    scrape: Callable[[], Awaitable[Collector]] | None = None,
) -> None:
    """Add the endpoints to an application.

    Args:
        body_bytes: most bytes of a request's body.
        scrape: as for ``create_app``.
    """

    async def parsed(request: Request, kind: type[F], use: Callable[[F], Any]) -> Any:
        """Parse a request's body, and call a function with it, in a thread: large ones take long."""
        content = await read_body(request, body_bytes)
        return await asyncio.to_thread(lambda: use(parse(kind, content)))

    async def answered(request: Request, kind: type[R], prepare: Callable[[R], tuple[Work, Format]]) -> Response:
        asked, (work, form) = await parsed(request, kind, lambda asked: (asked, prepare(asked)))
        if not asked.stream:
            return JSONResponse(await unless_gone(request.receive, _whole(runner, work, form)))
        events = _events(runner, work, form)
        # The status must be that of errors before the first token.
        first = await unless_gone(request.receive, events.__anext__())
        return EventStream(first, events)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answered(request, ChatRequest, requests.chat)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answered(request, CompletionRequest, requests.completion)

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        return await answered(request, ResponsesRequest, requests.response)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return await parsed(request, TokenizeRequest, requests.tokens)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        return await parsed(request, DetokenizeRequest, requests.text)

    @app.get("/metrics")
    async def metrics() -> Response:
        found = runner.metrics.registry if scrape is None else await scrape()
        return Response(generate_latest(found), media_type=CONTENT_TYPE_LATEST)

    async def health() -> Response:
        """Status 200; see ``mmspec.serving.drain`` for other times."""
        return Response()

    for path in (LIVE, *READY):
        app.get(path)(health)
    app.get("/v1/responses/{name}")(stored.get)
    app.delete("/v1/responses/{name}")(stored.delete)
    app.get("/v1/models")(catalog.models)
    app.get("/v1/models/{name:path}")(catalog.model)
    app.get("/", response_class=HTMLResponse)(catalog.page)


async def _whole(runner: Runner, work: Work, form: Format) -> dict[str, Any]:
    async with runner.start(work) as pieces:
        async for index, piece in pieces:
            form.answers[index].append(piece)
    return form.whole()


async def _events(runner: Runner, work: Work, form: Format) -> AsyncGenerator[bytes]:
    """Server-sent events; exceptions after the first one are events, too."""
    started = False
    try:
        async with runner.start(work) as pieces:
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
