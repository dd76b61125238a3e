"""The demo's server: the page and OpenAI's API in one process, accepted requests, temporary files, port."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock
from urllib.request import getproxies

import anyio
import gradio as gr
from fastapi import FastAPI
from gradio.blocks import Block
from gradio_client.utils import is_http_url_like
from rich.console import Console
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.adaptation.options import AdaptOptions
from mmspec.demos.catalog import Catalog
from mmspec.demos.chat_request import MAX_UPLOAD_MIB
from mmspec.demos.models import RUNNING, WAITING, ModelCache, QueuePlace, RequestQueue
from mmspec.demos.page import Tab, build
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder, running, temporary_folder
from mmspec.errors import UserError
from mmspec.progress import show_steps
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits, host_names
from mmspec.serving.middleware import PROBES

_API_PATHS = ("/v1", "/tokenize", "/detokenize", "/metrics", *PROBES)
_POLL = 0.02  # seconds between polls of the queue: requests of the page end in other threads
_GRADIO = "/gradio_api"
_POST_ROUTES = ("/upload", "/queue/join", "/cancel", "/reset", "/login")
_CALL_ROUTES = ("/call/", "/run/")  # followed by an endpoint; "/run" serves the page's unqueued events
_CLOSED_ROUTES = ("/proxy=", "/deep_link", "/stream", "/custom_component")
_ALIVE = "/alive"  # answered with an id of this server, which differs after a restart
_MAX_FORM_BYTES = 64 * 2**10  # maximum bytes of an upload's form without the file
_MAX_REQUEST_BYTES = 2**20  # maximum bytes of any other request


class RequestFilter:
    """ASGI middleware that rejects unneeded routes and oversized requests, and serves files of the upload folder only.

    gradio's server has further routes: one stores recordings outside of the upload folder and never removes them,
    others write state files there, or download URLs on behalf of clients.
    """

    def __init__(self, app: ASGIApp, uploads: UploadFolder) -> None:
        self.app = app
        self.uploads = uploads
        self.server = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = (scope["path"].partition(_GRADIO)[2] or scope["path"]).rstrip("/")
        if scope["method"] == "POST":
            status, message = self._check_post(route, Headers(scope=scope))
        else:
            status, message = (200, self.server) if route == _ALIVE else self._check_get(route)
        if status:
            await PlainTextResponse(message, status)(scope, receive, send)
        elif scope["method"] == "POST" and route == "/upload":
            await self._upload(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _check_get(self, route: str) -> tuple[int, str]:
        """Status and message of a rejected request; 0 if it is accepted."""
        for fetch in ("/file=", "/file/"):
            if route.startswith(fetch) and not self.uploads.contains(route.removeprefix(fetch)):
                return 403, "this file is not served"
        return (404, "not found") if route.startswith(_CLOSED_ROUTES) else (0, "")

    def _check_post(self, route: str, headers: Headers) -> tuple[int, str]:
        if route not in _POST_ROUTES and not route.startswith(_CALL_ROUTES):
            return 404, "not found"
        length = headers.get("content-length", "")
        if not length.isascii() or not length.isdigit() or "transfer-encoding" in headers:
            return 411, "a request must state its length: expected a Content-Length header"
        largest = MAX_UPLOAD_MIB * 2**20 + _MAX_FORM_BYTES if route == "/upload" else _MAX_REQUEST_BYTES
        if int(length) > largest:
            return 413, f"a request must have at most {largest} bytes: got {length}"
        return 0, ""

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = int(Headers(scope=scope)["content-length"])
        reserved = False

        async def reserve_first() -> Message:
            # The body is read only after the login check: requests without a login evict no uploads.
            nonlocal reserved
            if not reserved:
                reserved = await anyio.to_thread.run_sync(self.uploads.reserve, size)
                if not reserved:
                    raise HTTPException(507, "the server's space for uploads is full: try again in a few minutes")
            return await receive()

        try:
            await self.app(scope, reserve_first, send)
        finally:
            if reserved:
                self.uploads.release(size)


class Dispatcher:
    """ASGI middleware that routes the API's paths to the API, and other paths to the page."""

    def __init__(self, app: ASGIApp, api: ASGIApp) -> None:
        self.app, self.api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and _is_api(scope["path"])
        await (self.api if is_api else self.app)(scope, receive, send)


def _is_api(path: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in _API_PATHS)


class SharedSlots:
    """Queues the API's choices together with the page's requests; see ``mmspec.serving.runner.Admission``.

    Attributes:
        waiting: number of waiting choices.
    """

    def __init__(self, turns: RequestQueue) -> None:
        self._turns = turns
        self._running: list[QueuePlace] = []
        self.waiting = 0

    @property
    def running(self) -> int:
        return len(self._running)

    async def acquire(self, count: int) -> None:
        """Wait until ``count`` choices may start.

        Raises:
            APIError: status 429, the queue is full.
        """
        try:
            joined = self._turns.join(count)
        except UserError as error:
            raise APIError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"}) from None
        self.waiting += count
        try:
            while self._turns.ahead(joined[-1]) is not None:
                await asyncio.sleep(_POLL)
        except asyncio.CancelledError:
            self._turns.leave(joined)
            raise
        finally:
            self.waiting -= count
        self._running += joined

    def release(self, count: int = 1) -> None:
        """Release the turns of ended choices. Running turns are interchangeable."""
        self._turns.leave([self._running.pop() for _ in range(count)])


@dataclass(frozen=True)
class API:
    """Access settings and pipeline of the API.

    Attributes:
        model, drafter: model and drafter of the pipeline, which stays loaded.
        host: listening address; None accepts every name in the Host header.
        key: required API key; None requires none.
        adapt: options of a drafter that learns from requests, on a pipeline separate from the page's; None disables
            learning.
    """

    model: str
    drafter: str = "auto"
    host: str | None = "127.0.0.1"
    key: str | None = None
    adapt: AdaptOptions | None = None

    def app(self, models: ModelCache) -> FastAPI:
        """Create the API's application; see ``mmspec.serving.app.create_app``.

        Raises:
            UserError: the model or drafter cannot be loaded.
        """
        from mmspec.serving.app import create_app  # the page alone does not need its packages

        return create_app(
            models.keep(self.model, self.drafter, self.adapt),
            Limits(max_running=RUNNING, max_waiting=WAITING),
            api_key=self.key,
            hosts=None if self.host is None else host_names(self.host),
            slots=SharedSlots(models.turns),
        )


_move_to_cache = Block.async_move_resource_to_block_cache


async def refuse_urls(block: Block, url_or_file_path: str | Path | None) -> str | None:
    """Replacement for gradio's function that moves a request's file to a component; does not download URLs."""
    if is_http_url_like(url_or_file_path):
        message = "URLs are not downloaded: expected an uploaded file, gradio_client's handle_file(PATH)"
        raise gr.Error(message, print_exception=False)
    return await _move_to_cache(block, url_or_file_path)


_log = logging.getLogger("mmspec.demo")

_PORT_ATTEMPTS = 5
_GRACE = Limits().shutdown_timeout
_CSS = Path(__file__).with_name("style.css")
_SCRIPTS = Path(__file__).with_name("scripts")
_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "Menlo", "Consolas", "monospace"]


@contextmanager
def run_server(
    models: ModelCache,
    catalog: Catalog,
    *,
    api: FastAPI | None = None,
    upload_space: int = 2048,
    cleanup: tuple[float, float] = (60, 1800),
    opened: bool = False,
    **launch: Any,
) -> Iterator[gr.Blocks]:
    """Serve the demo until the block ends; uploads are kept in a temporary folder.

    Args:
        models: cache of loaded models.
        catalog: models and drafters that visitors may select.
        api: settings of OpenAI's API; None serves only the page.
        upload_space: limit on the total size of uploads, in MiB.
        cleanup: interval of the cleanup of unused uploads, and their minimum age, in seconds.
        opened: warm up and run the first tab's opening race at startup, not for the first visitor.
        **launch: options of gradio's ``launch``; a ``server_port`` of 0 selects a free port.
    """
    with (
        temporary_folder(launch.get("server_port", 0)) as folder,
        mock.patch.dict(os.environ, _gradio_environment(folder, launch.get("server_name", "127.0.0.1"))),
        mock.patch.object(Block, "async_move_resource_to_block_cache", refuse_urls),
        mock.patch("gradio.routes.DEFAULT_TEMP_DIR", str(folder), create=True),
    ):
        uploads = UploadFolder(folder, upload_space * 2**20)
        samples = folder / "samples"
        samples.mkdir()
        service = Service(models, catalog, uploads)
        demo, first = build(service, samples)
        uploads.exempt_existing()
        if opened:
            with show_steps(Console(stderr=True)), suppress(UserError):
                _log.info("warming up")
                service.warm_up(first.opening_request())
        _launch(
            demo,
            app_kwargs=_app_options(uploads, api),
            prevent_thread_lock=True,
            quiet=True,
            css_paths=_CSS,
            head=f"<script>{_script()}</script>",
            theme=_theme(),
            max_threads=2 * (RUNNING + WAITING),
            footer_links=["api"],
            max_file_size=MAX_UPLOAD_MIB * 2**20,
            enable_monitoring=False,
            run_history=False,
            ssr_mode=False,
            state_session_capacity=200,
            show_error=False,
            mcp_server=False,
            **{"share": False, **launch},
        )
        try:
            with uploads.periodic_cleanup(*cleanup), _opened(service, first) if opened else nullcontext():
                yield demo
        finally:
            uploads.remove_unused(age=0)  # first: closing waits for open pages and running requests
            _close(demo)


@contextmanager
def _opened(service: Service, first: Tab) -> Iterator[None]:
    """Run the opening race of a tab in a thread, until the block ends."""

    def work(ended: Event) -> None:
        with suppress(UserError), closing(service.opening(first.opening_request())) as races:  # type: ignore[type-var]
            for _ in races:
                if ended.is_set():
                    break

    with running(work, _GRACE):
        yield


def _app_options(uploads: UploadFolder, api: FastAPI | None) -> dict[str, Any]:
    restricted = Middleware(RequestFilter, uploads=uploads)
    if api is None:
        return {"middleware": [restricted]}
    return {"middleware": [Middleware(Dispatcher, api=api), restricted], "lifespan": api.router.lifespan_context}


def _script() -> str:
    """The page's scripts, which share one scope."""
    names = ("dom", "trees", "player", "media", "connection", "page")
    parts = [(_SCRIPTS / f"{name}.js").read_text() for name in names]
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();"


def _theme() -> gr.themes.Base:
    """gradio's default theme, with colours of sufficient contrast for text."""
    theme = gr.themes.Default(primary_hue="emerald", neutral_hue="gray", font=_FONTS, font_mono=_MONO)
    return theme.set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
    )


def _gradio_environment(folder: Path, host: str) -> dict[str, str]:
    own = ",".join(filter(None, (getproxies().get("no"), "localhost", "127.0.0.1", "::1", host.strip("[]"))))
    return {
        # At startup, gradio requests its listening address, which must bypass proxies.
        "NO_PROXY": own,
        "no_proxy": own,
        "GRADIO_TEMP_DIR": str(folder),
        "GRADIO_EXAMPLES_CACHE": str(folder / "examples"),  # default: below the working directory, and served
        # Disables analytics that gradio computes after every request for its monitoring page.
        "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(10**9),
    }


def _launch(demo: gr.Blocks, *, server_name: str = "127.0.0.1", server_port: int = 0, **options: Any) -> None:
    """Launch on a port; tries again if another process takes a free port before the server does."""
    for attempt in range(_PORT_ATTEMPTS):
        port = _bindable_port(server_name, server_port)
        try:
            demo.launch(server_name=server_name, server_port=port, **options)
            return
        except OSError:
            if server_port or attempt == _PORT_ATTEMPTS - 1:
                raise


def _close(demo: gr.Blocks) -> None:
    """Close the server; open pages and running requests have some seconds to end."""
    logging.getLogger("uvicorn.error").setLevel(
        logging.CRITICAL
    )  # it logs a traceback per connection; reset at a launch
    demo.server.config.timeout_graceful_shutdown = _GRACE
    demo.close(verbose=False)


def _bindable_port(host: str, port: int) -> int:
    """Check that a port can be bound, or select a free port for 0.

    Raises:
        OSError: the port cannot be bound; more specific than gradio's error.
    """
    address = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])
