"""Run the demo's server: gradio settings, upload limits, temporary files, port."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event
from time import monotonic as clock
from typing import Any
from unittest import mock

import gradio as gr
from fastapi import FastAPI
from gradio.blocks import Block
from rich.console import Console
from starlette.middleware import Middleware

from mmspec.demos.api import Dispatcher
from mmspec.demos.catalog import Catalog
from mmspec.demos.chat_request import MAX_UPLOAD_MIB
from mmspec.demos.models import ModelCache
from mmspec.demos.page import build
from mmspec.demos.request_filter import RequestFilter, refuse_urls
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder, running, temporary_folder
from mmspec.demos.tab import Tab
from mmspec.demos.turns import RUNNING, WAITING
from mmspec.errors import UserError
from mmspec.progress import show_steps
from mmspec.serving.settings import Limits

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
        api: answers the paths of OpenAI's API; None for the page alone.
        upload_space: limit on the total size of uploads, in MiB.
        cleanup: interval at which unused uploads are removed, and the age from which they are, in seconds.
        opened: warm up, and run the opening race of the first tab at once, instead of for the first visitor.
        **launch: options of gradio's ``launch``; a ``server_port`` of 0 selects a free port.
    """
    with (
        temporary_folder(launch.get("server_port", 0)) as folder,
        mock.patch.dict(os.environ, _gradio_environment(folder)),
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
            _close(demo, api)


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


def _gradio_environment(folder: Path) -> dict[str, str]:
    return {
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


def _close(demo: gr.Blocks, api: FastAPI | None) -> None:
    """Close the server; open pages and running requests have some seconds to end."""
    started = clock()
    if api is not None:
        api.state.drain.close_from_thread(_GRACE)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it logs a traceback for each; reset at a launch
    demo.server.config.timeout_graceful_shutdown = max(1, round(_GRACE - (clock() - started)))
    demo.close(verbose=False)


def _bindable_port(host: str, port: int) -> int:
    """Returns the port that a socket can bind to (0: any free one).

    Raises:
        OSError: there is none; more specific than gradio's error.
    """
    address = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])
