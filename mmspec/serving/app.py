"""The ASGI application: OpenAI's endpoints over one pipeline."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.serving.disconnect import ClientGoneError, EventStream, unless_gone
from mmspec.serving.drain import Drain, Drained
from mmspec.serving.errors import APIError
from mmspec.serving.grammars import GrammarChecker
from mmspec.serving.guard import Guard
from mmspec.serving.limits import Limits
from mmspec.serving.media import MediaReader, Medium
from mmspec.serving.metrics import Metrics
from mmspec.serving.protocol import ChatMessage, ChatRequest, CompletionRequest, TextPart, parse
from mmspec.serving.responses import ChatFormat, Format, TextFormat
from mmspec.serving.runner import Runner, Work
from mmspec.serving.slots import Admission, Slots

BODY_SECONDS = 60.0
"""Time in which a request's body must arrive."""

_MOST_VALUES = 1_000_000  # of a body, with the commas and brackets in its texts
_CLIENT_GONE = 499  # nginx' status; nobody receives it

_log = logging.getLogger("mmspec.serving")


def create_app(
    pipe: Pipeline,
    limits: Limits | None = None,
    *,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    allow_urls: bool = False,
    scrape: Callable[[], Awaitable[Collector]] | None = None,
    slots: Admission | None = None,
) -> FastAPI:
    """The application.

    Args:
        pipe: answers; its ``max_num_seqs`` must be at least ``limits.max_running``.
        limits: limits on requests.
        api_key: the key that requests must carry; None for none.
        hosts: accepted names of this server; None accepts all.
        origins: origins of web pages that may call the server.
        allow_urls: download images and videos from public addresses.
        scrape: collects the metrics that ``GET /metrics`` returns; None for those of this application.
        slots: lets requests in; None for slots of its own.
    """
    limits = limits or Limits()
    if limits.max_model_len and limits.max_model_len < (pipe.context_limit or limits.max_model_len + 1):
        pipe.context_limit = limits.max_model_len
    slots = slots or Slots(limits.max_running, limits.max_waiting)
    metrics = Metrics(pipe.name, lambda: slots.running, lambda: slots.waiting)
    media = MediaReader(pipe.io, limits, allow_urls=allow_urls)
    runner = Runner(pipe, media, GrammarChecker(), slots, metrics)
    endpoints = Endpoints(runner, limits, scrape)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # A choice waits for its next tokens in a thread; others add and cancel choices.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * limits.max_running + 2))
        yield
        runner.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_api_route("/v1/chat/completions", endpoints.chat, methods=["POST"])
    app.add_api_route("/v1/completions", endpoints.complete, methods=["POST"])
    app.add_api_route("/v1/models", endpoints.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", endpoints.model, methods=["GET"])
    app.add_api_route("/health", endpoints.health, methods=["GET"])
    app.add_api_route("/metrics", endpoints.metrics, methods=["GET"])
    for kind in (APIError, UserError, HTTPException, ClientGoneError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _respond)
    drain = Drain()
    app.add_middleware(Drained, drain=drain)
    app.add_middleware(Guard, hosts=hosts, origins=origins, api_key=api_key)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.state.slots, app.state.metrics, app.state.drain = slots, metrics, drain
    return app


async def _respond(_: Request, error: Exception) -> Response:
    """The response to a request that has failed."""
    if isinstance(error, ClientGoneError | ClientDisconnect):
        return Response(status_code=_CLIENT_GONE)
    return _as_api_error(error).response()


class Endpoints:
    """The endpoints.

    Args:
        runner: runs the requests.
        limits: limits on requests.
        scrape: as for ``create_app``.
    """

    def __init__(
        self, runner: Runner, limits: Limits, scrape: Callable[[], Awaitable[Collector]] | None = None
    ) -> None:
        self._runner, self._limits, self._scrape = runner, limits, scrape
        self._pipe = runner.pipe
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        asked, work = await asyncio.to_thread(self._chat_work, await self._body(request))
        return await self._answer(request, asked, work, ChatFormat)

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``: the prompts as they are, without a chat template."""
        asked, work = await asyncio.to_thread(self._text_work, await self._body(request))
        return await self._answer(request, asked, work, TextFormat)

    def _chat_work(self, body: bytes) -> tuple[ChatRequest, Work]:
        """A chat request. A large body takes long to parse, as in ``_text_work``: call it in a thread."""
        asked = parse(ChatRequest, _limited(body))
        self._check_model(asked.model)
        texts = [part.text for message in asked.messages for part in message.content if isinstance(part, TextPart)]
        self._check_characters(texts, "messages")
        messages, media = self._messages(asked.messages)
        params = asked.params(self._limits, self._pipe.defaults.params)
        self._runner.media.check(media)
        return asked, Work([messages], params, asked.constraint(), asked.n, media, {"logprobs": asked.alternatives})

    def _text_work(self, body: bytes) -> tuple[CompletionRequest, Work]:
        asked = parse(CompletionRequest, _limited(body))
        self._check_model(asked.model)
        self._check_characters(asked.prompt, "prompt")
        keywords = {"logprobs": asked.alternatives, "chat_template": False}
        params = asked.params(self._limits, self._pipe.defaults.params)
        work = Work(asked.prompt, params, asked.constraint(), asked.n, (), keywords)
        if work.choices > self._limits.max_running:
            most = self._limits.max_running
            raise APIError(400, f"a request may have at most {most} choices: got {work.choices}", "prompt")
        return asked, work

    async def models(self) -> dict[str, Any]:
        """``GET /v1/models``."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        """``GET /v1/models/NAME``."""
        self._check_model(name)
        return self._model()

    async def health(self) -> Response:
        """``GET /health``: status 200 while the server runs."""
        return Response()

    async def metrics(self) -> Response:
        """``GET /metrics``: Prometheus' text format."""
        found = self._runner.metrics.registry if self._scrape is None else await self._scrape()
        return Response(generate_latest(found), media_type=CONTENT_TYPE_LATEST)

    def _model(self) -> dict[str, Any]:
        limit = {"max_model_len": self._pipe.context_limit}
        return {"id": self._pipe.name, "object": "model", "created": self._created, "owned_by": "mmspec", **limit}

    def _check_model(self, name: str) -> None:
        if name != self._pipe.name:
            message = f"unknown model: expected {self._pipe.name!r}, got {name[:200]!r}"
            raise APIError(404, message, "model", "model_not_found")

    def _check_characters(self, texts: Sequence[str], param: str) -> None:
        most, found = self._limits.max_characters, sum(map(len, texts))
        if found > most:
            raise APIError(400, f"prompts must have at most {most} characters: got {found}", param)

    async def _body(self, request: Request) -> bytes:
        """The request's body.

        Raises:
            APIError: it is too large, or takes too long.
        """
        most = self._limits.body_bytes
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

    def _messages(self, given: Sequence[ChatMessage]) -> tuple[list[dict[str, Any]], list[Medium]]:
        """Chat messages in transformers' format, and their images and videos in order."""
        messages, media = [], []
        for place, message in enumerate(given):
            items: list[dict[str, Any]] = []
            for number, part in enumerate(message.content):
                if isinstance(part, TextPart):
                    items.append({"type": "text", "text": part.text})
                    continue
                kind: Any = part.type.removesuffix("_url")
                url = part.image_url.url if part.type == "image_url" else part.video_url.url
                media.append(Medium(kind, url, f"messages[{place}].content[{number}].{part.type}.url"))
                items.append({"type": kind})
            # Templates of text models expect a text.
            content: Any = items
            if not self._pipe.io.reads_media:
                content = "\n".join(item.get("text", "") for item in items)
            role = "system" if message.role == "developer" else message.role
            messages.append({"role": role, "content": content})
        return messages, media

    async def _answer(
        self, request: Request, asked: ChatRequest | CompletionRequest, work: Work, kind: type[Format]
    ) -> Response:
        logprobs = asked.alternatives is not None
        form = kind(self._pipe.name, self._token_text, work.n, work.choices, logprobs=logprobs)
        receive = request.receive
        if not asked.stream:
            return JSONResponse(await unless_gone(receive, self._whole(work, form)))
        events = self._events(work, form, asked.include_usage)
        # The status must be that of errors before the first token.
        first = await unless_gone(receive, events.__anext__())
        return EventStream(first, events)

    def _token_text(self, token: int) -> str:
        return self._pipe.io.tokenizer.decode([token])

    async def _whole(self, work: Work, form: Format) -> dict[str, Any]:
        async with self._runner.start(work) as pieces:
            async for index, piece in pieces:
                form.answers[index].append(piece)
        return form.whole()

    async def _events(self, work: Work, form: Format, include_usage: bool) -> AsyncGenerator[bytes]:
        """Server-sent events; exceptions after the first one are events, too."""
        started = False
        try:
            async with self._runner.start(work) as pieces:
                async for index, piece in pieces:
                    if not started:
                        for chunk in form.first_chunks():
                            yield _event(chunk)
                        started = True
                    yield _event(form.chunk(index, piece, include_usage=include_usage))
            if include_usage:
                yield _event(form.usage_chunk())
        except Exception as error:
            if not started:
                raise
            found = _as_api_error(error)
            if found.status >= 500:
                _log.error("a request failed", exc_info=error)
            yield _event(found.content())
        yield b"data: [DONE]\n\n"


def _limited(body: bytes) -> bytes:
    """A body with a limit on its values: all threads wait while millions of them are parsed."""
    if (found := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > _MOST_VALUES:
        raise APIError(400, f"a request's body must have at most {_MOST_VALUES} values: got about {found}")
    return body


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _as_api_error(error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail), headers=error.headers)
    return APIError(500, f"internal error ({type(error).__name__}): details are in the server's log")
