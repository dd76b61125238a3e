"""The demo's server: the page and OpenAI's API in one process, accepted requests, temporary files, port."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
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

from mmspec.adaptation import AdaptOptions
from mmspec.demos.catalog import Catalog
from mmspec.demos.chat_request import MAX_UPLOAD_MIB
from mmspec.demos.models import RUNNING, WAITING, ModelCache
from mmspec.demos.page import build
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder, temporary_folder
from mmspec.drafters.registry import PLAIN, registered_name
from mmspec.errors import UserError
from mmspec.progress import show_steps
from mmspec.serving.middleware import PROBES
from mmspec.serving.settings import Limits, host_names

_log = logging.getLogger("mmspec.demo")

_API_PATHS = ("/v1", "/tokenize", "/detokenize", "/metrics", *PROBES)
_GRADIO = "/gradio_api"
_POST_ROUTES = ("/upload", "/queue/join", "/cancel", "/reset", "/login")
_CALL_ROUTES = ("/call/", "/run/")  # followed by an endpoint; "/run" serves the page's unqueued events
_CLOSED_ROUTES = ("/proxy=", "/deep_link", "/stream", "/custom_component")
_ALIVE = "/alive"  # answered with an id of this server, which differs after a restart
_MAX_FORM_BYTES = 64 * 2**10  # maximum bytes of an upload's form without the file
_MAX_REQUEST_BYTES = 2**20  # maximum bytes of any other request


class RequestFilter:
    """ASGI middleware that rejects unneeded routes and oversized requests, serves files of the upload folder only, and
    sends the paths of OpenAI's API to ``api``.

    gradio's server has further routes: one stores recordings outside of the upload folder and never removes them,
    others write state files there, or download URLs on behalf of clients.
    """

    def __init__(self, app: ASGIApp, uploads: UploadFolder, api: ASGIApp | None = None) -> None:
        self.app, self.uploads, self.api = app, uploads, api
        self.server = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = self._answering(scope) if scope["type"] == "http" else self.app
        await answering(scope, receive, send)

    def _answering(self, scope: Scope) -> ASGIApp:
        """The application that answers a request: gradio, the API, or a response that refuses the request."""
        if self.api is not None and any(f"{scope['path']}/".startswith(f"{path}/") for path in _API_PATHS):
            return self.api
        route = (scope["path"].partition(_GRADIO)[2] or scope["path"]).rstrip("/")
        if scope["method"] != "POST":
            if route == _ALIVE:
                return PlainTextResponse(self.server)
            for fetch in ("/file=", "/file/"):
                if route.startswith(fetch) and not self.uploads.contains(route.removeprefix(fetch)):
                    return PlainTextResponse("this file is not served", 403)
            return PlainTextResponse("not found", 404) if route.startswith(_CLOSED_ROUTES) else self.app
        if route not in _POST_ROUTES and not route.startswith(_CALL_ROUTES):
            return PlainTextResponse("not found", 404)
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if not length.isascii() or not length.isdigit() or "transfer-encoding" in headers:
            return PlainTextResponse("a request must state its length: expected a Content-Length header", 411)
        largest = MAX_UPLOAD_MIB * 2**20 + _MAX_FORM_BYTES if route == "/upload" else _MAX_REQUEST_BYTES
        if int(length) > largest:
            return PlainTextResponse(f"a request must have at most {largest} bytes: got {length}", 413)
        return self._upload if route == "/upload" else self.app

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


def make_api(
    models: ModelCache,
    model: str,
    drafter: str = "auto",
    host: str | None = "127.0.0.1",
    key: str | None = None,
    adapt: AdaptOptions | None = None,
) -> FastAPI:
    """The application of OpenAI's API, whose model and drafter stay loaded, see ``ModelCache.keep``. Without a
    listening address (``host``), every name in the Host header is accepted."""
    from mmspec.serving.app import create_app  # the page alone does not need its packages

    pipe = models.keep(model, drafter, adapt)
    return create_app(
        {registered_name(pipe.drafter) or PLAIN: pipe},
        Limits(max_running=RUNNING, max_waiting=WAITING),
        api_key=key,
        hosts=None if host is None else host_names(host),
        slots=models.turns,
    )


_move_to_cache = Block.async_move_resource_to_block_cache


async def refuse_urls(block: Block, url_or_file_path: str | Path | None) -> str | None:
    """Replacement for gradio's function that moves a request's file to a component; does not download URLs."""
    if is_http_url_like(url_or_file_path):
        message = "URLs are not downloaded: expected an uploaded file, gradio_client's handle_file(PATH)"
        raise gr.Error(message, print_exception=False)
    return await _move_to_cache(block, url_or_file_path)


_GRACE = Limits().shutdown_timeout
_HERE = Path(__file__).parent
_SCRIPTS = ("trees", "player", "media", "connection", "page")  # in one scope
_THEME = gr.themes.Default(
    primary_hue="emerald",
    neutral_hue="gray",
    font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
    font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"],
).set(  # colours of sufficient contrast for text
    button_primary_background_fill="*primary_700",
    button_primary_background_fill_hover="*primary_800",
    button_primary_background_fill_dark="*primary_700",
    button_primary_background_fill_hover_dark="*primary_800",
    body_text_color_subdued="*neutral_600",
    body_text_color_subdued_dark="*neutral_400",
    block_info_text_color="*neutral_600",
    block_info_text_color_dark="*neutral_400",
)


@contextmanager
def run_server(
    models: ModelCache,
    catalog: Catalog,
    *,
    api: FastAPI | None = None,
    upload_space: int = 2048,
    cleanup: tuple[float, float] = (60, 1800),
    opened: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
    **launch: Any,
) -> Iterator[gr.Blocks]:
    """Serve the demo until the block ends; uploads are kept in a temporary folder. ``OSError``: the port cannot be
    bound.

    Args:
        api: OpenAI's API; None serves only the page.
        upload_space: limit on the total size of uploads, in MiB.
        cleanup: interval of the cleanup of unused uploads, and their minimum age, in seconds.
        opened: warm up and run the first tab's opening race at startup, not for the first visitor.
        **launch: options of gradio's ``launch``.
    """
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as probe:  # gradio's own error does not say why
        free = probe.getsockname()[1]
    exempt = ",".join(filter(None, (getproxies().get("no"), "localhost", "127.0.0.1", "::1", address)))
    with (
        temporary_folder(port) as folder,
        mock.patch.dict(
            os.environ,
            {
                # At startup, gradio requests its listening address, which must bypass proxies.
                "NO_PROXY": exempt,
                "no_proxy": exempt,
                "GRADIO_TEMP_DIR": str(folder),
                "GRADIO_EXAMPLES_CACHE": str(folder / "examples"),  # default: below the working directory, and served
                # Disables analytics that gradio computes after every request for its monitoring page.
                "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(10**9),
            },
        ),
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
        app = {"middleware": [Middleware(RequestFilter, uploads=uploads, api=api)]}
        script = "\n".join((_HERE / "scripts" / f"{name}.js").read_text() for name in _SCRIPTS)
        demo.launch(
            server_name=host,
            server_port=free,
            app_kwargs=app if api is None else {**app, "lifespan": api.router.lifespan_context},
            prevent_thread_lock=True,
            quiet=True,
            css_paths=_HERE / "style.css",
            head=f'<script>(() => {{\n"use strict";\n{script}}})();</script>',
            theme=_THEME,
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

        ended = Event()

        def clean() -> None:
            interval, age = cleanup
            while not ended.wait(interval):
                uploads.remove_unused(age)

        def race() -> None:
            with suppress(UserError), closing(service.opening(first.opening_request())) as races:  # type: ignore[type-var]
                next((True for _ in races if ended.is_set()), None)

        threads = [Thread(target=work, daemon=True) for work in (clean, *[race] * opened)]
        for thread in threads:
            thread.start()
        try:
            yield demo
        finally:
            ended.set()
            for thread in threads:
                thread.join(_GRACE)
            uploads.remove_unused(age=0)  # first: closing waits for open pages and running requests
            # uvicorn logs a traceback per connection; the next launch resets the level.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            demo.server.config.timeout_graceful_shutdown = _GRACE  # for open pages and running requests
            demo.close(verbose=False)
