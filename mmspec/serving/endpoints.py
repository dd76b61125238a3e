"""The endpoints: OpenAI's, and vLLM's for tokens."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import HTMLResponse, JSONResponse

from mmspec.serving import body
from mmspec.serving.catalog import Catalog
from mmspec.serving.disconnect import EventStream, unless_gone
from mmspec.serving.errors import APIError, as_api_error
from mmspec.serving.fields import F, parse
from mmspec.serving.limits import Limits
from mmspec.serving.media import Medium
from mmspec.serving.messages import ChatMessage, conversation
from mmspec.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from mmspec.serving.responses import ChatFormat, Format, TextFormat
from mmspec.serving.runner import Runner, Work
from mmspec.serving.tool_use import Tool, ToolUse

_log = logging.getLogger("mmspec.serving")


class Endpoints:
    """The endpoints.

    Args:
        runner: runs the requests.
        limits: limits on requests.
        catalog: names of the model.
        tools: calls of tools.
        scrape: as for ``create_app``.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        catalog: Catalog,
        tools: ToolUse,
        scrape: Callable[[], Awaitable[Collector]] | None = None,
    ) -> None:
        self._runner, self._limits, self._catalog, self._tools, self._scrape = runner, limits, catalog, tools, scrape
        self._pipe = runner.pipe

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        asked, work, form = await self._parsed(request, ChatRequest, self._chat_work)
        return await self._answer(request, asked, work, form)

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``: the prompts as they are, without a chat template."""
        asked, work, form = await self._parsed(request, CompletionRequest, self._text_work)
        return await self._answer(request, asked, work, form)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """``POST /tokenize``, as vLLM's."""
        return await self._parsed(request, TokenizeRequest, self._tokens)

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """``POST /detokenize``, as vLLM's."""
        return await self._parsed(request, DetokenizeRequest, self._text)

    async def _parsed(self, request: Request, kind: type[F], use: Callable[[F], Any]) -> Any:
        """Parse a request's body, and call a function with it, in a thread: large ones take long."""
        content = await body.read(request, self._limits.body_bytes)
        return await asyncio.to_thread(lambda: use(parse(kind, content)))

    def _chat_work(self, asked: ChatRequest) -> tuple[ChatRequest, Work, Format]:
        self._catalog.check(asked.model)
        messages, media = self._conversation(asked.messages, asked.tools)
        params, constraint = asked.params(self._limits, self._pipe.defaults.params), asked.constraint()
        self._runner.media.check(media)
        schema = None if constraint is None else constraint[1]
        use = self._tools.of(asked.tools, asked.tool_choice, several=asked.parallel_tool_calls, schema=schema)
        source = None if use.grammar is None else "tools"
        constraint = constraint if use.grammar is None else ("grammar", use.grammar)
        keywords = {"logprobs": asked.alternatives, **use.keywords}
        work = Work([use.messages(messages)], params, constraint, asked.n, media, keywords, use.trigger, source)
        before = [""] * work.n
        form = ChatFormat(self._catalog.name, self._token_text, work.n, before, asked.alternatives, reader=use.reader)
        return asked, work, form

    def _conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[Medium]]:
        texts = [text for message in messages for text in message.texts]
        self._check_characters([*texts, *(tool.model_dump_json() for tool in tools)], "messages")
        return conversation(messages, self._pipe.io.reads_media)

    def _text_work(self, asked: CompletionRequest) -> tuple[CompletionRequest, Work, Format]:
        self._catalog.check(asked.model)
        self._check_characters(asked.prompt, "prompt")
        keywords = {"logprobs": asked.alternatives, "chat_template": False}
        params = asked.params(self._limits, self._pipe.defaults.params)
        work = Work(asked.prompt, params, asked.constraint(), asked.n, (), keywords)
        if work.choices > self._limits.max_running:
            most = self._limits.max_running
            raise APIError(400, f"a request may have at most {most} choices: got {work.choices}", "prompt")
        before = [self._prompt_text(prompt) if asked.echo else "" for prompt in work.prompts for _ in range(work.n)]
        return asked, work, TextFormat(self._catalog.name, self._token_text, work.n, before, asked.alternatives)

    def _prompt_text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        self._pipe.io.check_ids(prompt)
        return str(self._pipe.io.tokenizer.decode(prompt))

    def _tokens(self, asked: TokenizeRequest) -> dict[str, Any]:
        self._catalog.check(asked.model)
        io = self._pipe.io
        if asked.messages is None:
            self._check_characters([asked.prompt or ""], "prompt")
            tokens = io.text_ids(asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False)
        else:
            messages, media = self._conversation(asked.messages, asked.tools)
            if media:
                raise APIError(400, f"tokens are those of texts: got {media[0].kind}_url", media[0].param)
            use = self._tools.of(asked.tools, "auto")
            tokens = io.encode([{"prompt": use.messages(messages)}], **use.keywords).input_ids[0].tolist()
        names = io.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        limit = {"max_model_len": self._pipe.context_limit}
        return {"count": len(tokens), **limit, "tokens": tokens, "token_strs": names}

    def _text(self, asked: DetokenizeRequest) -> dict[str, Any]:
        self._catalog.check(asked.model)
        self._check_characters([asked.tokens], "tokens")
        return {"prompt": self._prompt_text(asked.tokens)}

    async def models(self) -> dict[str, Any]:
        """``GET /v1/models``."""
        return self._catalog.models()

    async def model(self, name: str) -> dict[str, Any]:
        """``GET /v1/models/NAME``."""
        self._catalog.check(name)
        return self._catalog.model(name)

    async def page(self) -> Response:
        """``GET /``: the endpoints."""
        return HTMLResponse(self._catalog.page())

    async def health(self) -> Response:
        """``GET /health``: status 200 while the server runs."""
        return Response()

    async def metrics(self) -> Response:
        """``GET /metrics``: Prometheus' text format."""
        found = self._runner.metrics.registry if self._scrape is None else await self._scrape()
        return Response(generate_latest(found), media_type=CONTENT_TYPE_LATEST)

    def _check_characters(self, texts: Sequence[Sequence[Any]], param: str) -> None:
        most, found = self._limits.max_characters, sum(map(len, texts))
        if found > most:
            raise APIError(400, f"prompts must have at most {most} characters: got {found}", param)

    async def _answer(
        self, request: Request, asked: ChatRequest | CompletionRequest, work: Work, form: Format
    ) -> Response:
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
            found = as_api_error(error)
            if found.status >= 500:
                _log.error("a request failed", exc_info=error)
            yield _event(found.content())
        yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
