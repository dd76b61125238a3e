"""The ASGI application: the endpoints of OpenAI's, Anthropic's and Ollama's APIs, of vLLM and of llama.cpp."""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from mmspec.drafters.registry import PLAIN
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.reasoning import reasoning_format
from mmspec.serving.call_formats import AUTO, tool_format
from mmspec.serving.errors import MESSAGES, APIError, as_api_error
from mmspec.serving.formats import WireFormat
from mmspec.serving.media import MediaReader
from mmspec.serving.messages import MessagesFormat, MessagesRequest
from mmspec.serving.metrics import Metrics
from mmspec.serving.middleware import (
    CLIENT_GONE,
    LOG,
    PROBES,
    AccessGuard,
    RequestLimit,
    RequestLog,
    RequestQueue,
    Watched,
)
from mmspec.serving.ollama import OllamaFormat, OllamaRequest, ShowRequest, describe
from mmspec.serving.responses import ResponsesRequest, StoredResponses
from mmspec.serving.runner import GenerationJob, GrammarChecker, JobBuilder, RequestRunner
from mmspec.serving.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    F,
    GenerationRequest,
    InfillRequest,
    TokenizeRequest,
    parse,
)
from mmspec.serving.settings import Limits
from mmspec.targets.processor import template_variables

_STORED_SECONDS = 3600

R = TypeVar("R", bound=GenerationRequest)
T = TypeVar("T")


def create_app(
    pipes: Mapping[str, Pipeline],
    limits: Limits,
    *,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    names: Sequence[str] = (),
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    allow_urls: bool = False,
    num_draft_tokens: int | None = None,
    scrape: Callable[[], Awaitable[Collector]] | None = None,
    slots: RequestQueue | None = None,
) -> FastAPI:
    """Create the application.

    Args:
        pipes: pipelines over one target by drafter, the default first; ``max_num_seqs`` of each must be at least
            ``limits.max_running``.
        hosts: accepted Host names; None accepts all.
        names: model names that requests may use, of which responses use the first; by default the pipeline's name.
        reasoning_parser: format of reasoning; see ``mmspec.sampling.reasoning``.
        num_draft_tokens: draft tokens per step of requests that name no number; None chooses adaptively.
        scrape: collects the metrics for ``GET /metrics``; None for this application's own.
        slots: queue that the application shares with others; None creates one.
    """
    pipe = next(iter(pipes.values()))
    slots = slots or RequestQueue(limits.max_running, limits.max_waiting)
    names = tuple(names) or (pipe.name,)
    counts = (lambda: slots.running, lambda: slots.waiting, lambda: pipe.engine.threads.count)
    metrics = Metrics(names[0], *counts, {*pipes, PLAIN})
    media = MediaReader(pipe.processor, limits, allow_urls=allow_urls)
    runner = RequestRunner(pipes, media, GrammarChecker(), slots, metrics, limits.request_timeout)
    stored = StoredResponses(limits.max_stored, _STORED_SECONDS)
    tools = tool_format(pipe.processor, tool_call_parser)
    variables = template_variables(pipe.processor.plain, chat_template_kwargs) if chat_template_kwargs else {}
    form = reasoning_format(reasoning_parser, pipe.processor.chat_template_text())
    reasoning = None if form is None else form.name
    builder = JobBuilder(pipe, limits, names, tools, media, stored, reasoning, variables, list(pipes), num_draft_tokens)

    running = set[asyncio.Task[Any]]()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # One thread per choice waits for its next tokens; further threads add and cancel choices.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * limits.max_running + 2))
        yield
        if running:  # cancelled by the server
            await asyncio.wait(running, timeout=1)
        runner.close()
        if pipe.adaptation is not None:
            pipe.adaptation.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    _add_generation(app, runner, builder, limits.body_bytes, slots)
    context_limit = limits.context_limit(pipe.context_limit)
    _add_models(app, (*names, *pipe.adapters), builder.check_model, context_limit)
    app.get("/v1/responses/{name}")(stored.get)
    app.delete("/v1/responses/{name}")(stored.delete)

    @app.get("/metrics")
    async def figures() -> Response:
        found = metrics.registry if scrape is None else await scrape()
        return Response(generate_latest(found), media_type=CONTENT_TYPE_LATEST)

    async def health() -> Response:
        """Status 200; ``mmspec.serving.middleware`` answers during loading and shutdown."""
        return Response()

    for path in PROBES:
        app.get(path)(health)
    for kind in (APIError, UserError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, _respond)
    app.add_middleware(RequestLimit, running=running, most=limits.requests)
    app.add_middleware(AccessGuard, hosts=hosts, origins=origins, api_key=api_key)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestLog)
    app.state.slots, app.state.metrics = slots, metrics
    return app


def _add_generation(
    app: FastAPI, runner: RequestRunner, builder: JobBuilder, body_bytes: int, slots: RequestQueue
) -> None:
    async def parsed(request: Request, kind: type[F], use: Callable[[F], Any]) -> Any:
        """Parse a request body and call ``use`` with it, in a thread: large bodies take long."""
        content = await read_body(request, body_bytes)
        return await asyncio.to_thread(lambda: use(parse(kind, content, runner.metrics.ignored)))

    def add(path: str, kind: type[R], build: Callable[[R], tuple[GenerationJob, WireFormat]]) -> None:
        @app.post(path)
        async def answer(request: Request) -> Response:
            asked, (job, form) = await parsed(request, kind, lambda asked: (asked, build(asked)))
            request.scope[LOG].form = form
            if "anthropic-beta" in request.headers:
                runner.metrics.ignored("anthropic-beta")
            if not asked.stream:
                return JSONResponse(await unless_gone(request.receive, _whole(runner, job, form)))
            events = _events(runner, job, form, request.scope[LOG])
            # Errors before the first token still determine the response's status.
            await unless_gone(request.receive, events.__anext__())
            return EventStream(events, headers={"Cache-Control": "no-cache"}, media_type=form.media_type)

    add("/v1/chat/completions", ChatCompletionRequest, builder.chat)
    add("/v1/completions", CompletionRequest, builder.completion)
    add("/v1/responses", ResponsesRequest, builder.response)
    add("/infill", InfillRequest, builder.infill)
    add(MESSAGES, MessagesRequest, partial(builder.chat, form=MessagesFormat))

    add("/api/chat", OllamaRequest, partial(builder.chat, form=OllamaFormat))
    add("/api/generate", OllamaRequest, partial(builder.chat, form=partial(OllamaFormat, generates=True)))

    @app.post(f"{MESSAGES}/count_tokens")
    async def count(request: Request) -> dict[str, int]:
        job, _ = await parsed(request, MessagesRequest, builder.chat)
        return {"input_tokens": await unless_gone(request.receive, runner.count(job))}

    def add_reply(path: str, kind: type[F], reply: Callable[[F], dict[str, Any]]) -> None:
        @app.post(path)
        async def answer(request: Request) -> dict[str, Any]:
            return await parsed(request, kind, reply)

    add_reply("/api/show", ShowRequest, describe(app, builder, slots))
    add_reply("/tokenize", TokenizeRequest, builder.tokens)
    add_reply("/detokenize", DetokenizeRequest, builder.text)


def _add_models(app: FastAPI, names: Sequence[str], check: Callable[[str], None], context_limit: int | None) -> None:
    """Add the endpoints that describe the model and the server."""
    created = int(time.time())

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """OpenAI's model object, with vLLM's ``max_model_len``."""
        check(name)
        limit = {"max_model_len": context_limit}
        return {"id": name, "object": "model", "created": created, "owned_by": "mmspec", **limit}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """OpenAI's model list: one object per name."""
        return {"object": "list", "data": [model(name) for name in names]}

    @app.get("/")
    def page() -> HTMLResponse:
        lines = [f"mmspec serve: {names[0]}", "Base URL of OpenAI's clients: /v1 of this address", "", *_endpoints(app)]
        return HTMLResponse(f"<!doctype html><title>mmspec</title><pre>{html.escape(chr(10).join(lines))}</pre>")


_INSTEAD: Mapping[str, Sequence[str]] = {
    "the model generates text: use a server of embeddings": (
        *("/v1/embeddings", "/v1/rerank", "/v1/score", "/api/embed", "/api/embeddings"),
    ),
    "the server has one model: see mmspec serve --help": ("/api/pull", "/api/push", "/api/create", "/api/delete"),
    "the model generates text: ask it through POST /v1/chat/completions": ("/v1/moderations",),
    "the model reads no audio: use POST /v1/chat/completions": ("/v1/audio", "/v1/realtime"),
    "the model generates text only: use POST /v1/chat/completions": ("/v1/images", "/v1/videos"),
    "send images and videos as data URIs to POST /v1/chat/completions": ("/v1/files", "/v1/uploads"),
    "send requests to POST /v1/chat/completions at the same time: they decode together": ("/v1/batches",),
    "use POST /v1/responses with previous_response_id": ("/v1/conversations", "/v1/assistants", "/v1/threads"),
    "the server does not train: see the command mmspec train": ("/v1/fine_tuning",),
    "this is OpenAI's API: use POST /v1/completions": ("/completion", "/generate"),
    "the base URL ends with /v1": ("/chat/completions", "/completions", "/responses"),
}
"""Paths of other APIs, by what to use in their place."""


def _endpoints(app: FastAPI) -> list[str]:
    return [f"{min(route.methods or ())} {route.path_format}" for route in app.routes if isinstance(route, APIRoute)]


async def _respond(request: Request, error: Exception) -> Response:
    """Error response of a failed request; for an unknown path, it suggests an endpoint."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException) and error.status_code == 404:
        path = request.url.path
        known = (
            instead for instead, prefixes in _INSTEAD.items() for one in prefixes if f"{path}/".startswith(f"{one}/")
        )
        expected = next(known, f"expected one of {', '.join(_endpoints(request.app))}")
        error = APIError(404, f"there is no {path[:100]} here: {expected}")
    request.scope[LOG].error = error
    return as_api_error(error).response(request.url.path)


async def _whole(runner: RequestRunner, job: GenerationJob, form: WireFormat) -> dict[str, Any]:
    async with runner.start(job) as pieces:
        form.reached("queue_s")
        async for index, piece in pieces:
            form.reached("first_token_s")
            form.add(index, piece)
    return form.whole()


async def _events(runner: RequestRunner, job: GenerationJob, form: WireFormat, log: Watched) -> AsyncGenerator[bytes]:
    """Server-sent events, after an empty one at the first token; exceptions after that are sent as events, too."""
    started = False
    try:
        async with runner.start(job) as pieces:
            form.reached("queue_s")
            async for index, piece in pieces:
                form.reached("first_token_s")
                if not started:
                    started = True
                    yield b""
                    for chunk in form.first_chunks():
                        yield form.event(chunk)
                for chunk in form.chunks(index, piece):
                    yield form.event(chunk)
    except Exception as error:
        if not started:
            raise
        log.error = error
        for chunk in form.failed(as_api_error(error)):
            yield form.event(chunk)
    yield form.end


async def read_body(request: Request, most: int) -> bytes:
    """Read a request body of at most ``most`` bytes. Raises ``APIError``: status 413, the body is too large."""
    error = APIError(413, f"a request's body must have at most {most} bytes: got more")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > most:
        raise error
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise error
    return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it when the client of the request, whose body has been read, disconnects. Raises
    ``ClientDisconnect``: the client has disconnected."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of events that closes its generator when the client disconnects; starlette leaves it open."""

    body_iterator: AsyncGenerator[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            with suppress(ClientDisconnect, OSError):
                await unless_gone(receive, self.stream_response(send))
