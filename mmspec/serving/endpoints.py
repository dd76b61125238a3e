"""The endpoints: OpenAI's, and vLLM's for tokens. Their work ends when its client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from mmspec.serving.catalog import Catalog
from mmspec.serving.drain import PROBES
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
T = TypeVar("T")


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

    for path in PROBES:
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


class ClientGoneError(Exception):
    """The client has closed the connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it when the client disconnects.

    Args:
        receive: of the request, whose body has been read.

    Raises:
        ClientGoneError: the client has disconnected.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of server-sent events that closes its generator as soon as the client disconnects.

    starlette's own leaves an open generator to the garbage collector.

    Args:
        first: the first event, which the generator has already yielded.
        events: further ones.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        async def all_events() -> AsyncIterator[bytes]:
            yield first
            async for event in events:
                yield event

        self._events = events
        super().__init__(all_events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        except (ClientGoneError, OSError):
            pass
        finally:
            await self._events.aclose()
