"""The ASGI application: OpenAI's endpoints over one pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.serving.catalog import Catalog, unknown_path
from mmspec.serving.drain import Drain, Drained
from mmspec.serving.endpoints import ClientGoneError, add_endpoints
from mmspec.serving.errors import APIError, as_api_error
from mmspec.serving.grammars import GrammarChecker
from mmspec.serving.guard import Guard
from mmspec.serving.limits import Limits
from mmspec.serving.media import MediaReader
from mmspec.serving.metrics import Metrics
from mmspec.serving.requests import Requests
from mmspec.serving.runner import Runner
from mmspec.serving.slots import Admission, Slots
from mmspec.serving.stored import StoredResponses
from mmspec.serving.tool_formats import AUTO
from mmspec.serving.tool_use import ToolUse

_CLIENT_GONE = 499  # nginx' status; nobody receives it
_STORED_SECONDS = 3600


def create_app(
    pipe: Pipeline,
    limits: Limits,
    *,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    names: Sequence[str] = (),
    tool_parser: str = AUTO,
    allow_urls: bool = False,
    scrape: Callable[[], Awaitable[Collector]] | None = None,
    slots: Admission | None = None,
) -> FastAPI:
    """The application.

    Args:
        pipe: answers; its ``max_num_seqs`` must be at least ``limits.max_running``.
        api_key: the key that requests must carry; None for none.
        hosts: accepted names of this server; None accepts all.
        origins: origins of web pages that may call the server.
        names: what requests may call the model, the first one in responses; by default the pipeline's name.
        tool_parser: format of tool calls; see ``tool_format``.
        allow_urls: download images and videos from public addresses.
        scrape: collects the metrics that ``GET /metrics`` returns; None for those of this application.
        slots: lets requests in; None for slots of its own.
    """
    pipe = pipe.limited(limits.max_model_len) if limits.max_model_len else pipe
    slots = slots or Slots(limits.max_running, limits.max_waiting)
    catalog = Catalog(pipe, names)
    metrics = Metrics(catalog.name, lambda: slots.running, lambda: slots.waiting, lambda: pipe.engine.threads.count)
    media = MediaReader(pipe.io, limits, allow_urls=allow_urls)
    runner = Runner(pipe, media, GrammarChecker(), slots, metrics, limits.request_timeout)
    stored = StoredResponses(limits.max_stored, _STORED_SECONDS)
    requests = Requests(pipe, limits, catalog, ToolUse(pipe.io, tool_parser), media, stored)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # A choice waits for its next tokens in a thread; others add and cancel choices.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * limits.max_running + 2))
        yield
        runner.close()
        if pipe.adaptation is not None:
            pipe.adaptation.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    add_endpoints(app, runner, requests, catalog, stored, limits.body_bytes, scrape)
    for kind in (APIError, UserError, HTTPException, ClientGoneError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _respond)
    drain = Drain()
    app.add_middleware(Drained, drain=drain, most=limits.requests)
    app.add_middleware(Guard, hosts=hosts, origins=origins, api_key=api_key)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.state.slots, app.state.metrics, app.state.drain = slots, metrics, drain
    return app


async def _respond(request: Request, error: Exception) -> Response:
    """The response to a request that has failed."""
    if isinstance(error, ClientGoneError | ClientDisconnect):
        return Response(status_code=_CLIENT_GONE)
    if isinstance(error, HTTPException) and error.status_code == 404:
        return unknown_path(request.url.path).response()
    return as_api_error(error).response()
