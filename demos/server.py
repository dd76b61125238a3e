"""The server: limits, temporary files, and how it is reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import gradio as gr
from gradio.blocks import Block
from starlette.middleware import Middleware

from demos.gate import Gate, no_downloads
from demos.models import Models
from demos.offer import Offer
from demos.page import build
from demos.questions import LARGEST_UPLOAD
from demos.service import Service
from demos.storage import Uploads, temporary_folder

_PORTS = 5  # free ones to try
_CSS = Path(__file__).with_name("style.css")
_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "Menlo", "Consolas", "monospace"]


@contextmanager
def serving(
    models: Models,
    offer: Offer,
    *,
    upload_space: int = 2048,
    removal: tuple[float, float] = (60, 1800),
    **launch: Any,
) -> Iterator[gr.Blocks]:
    """The demo, listening until the block ends; uploads are in a folder of its own that goes with it.

    Args:
        models: what answers.
        offer: what visitors may choose.
        upload_space: MiB that uploads may take together.
        removal: how often uploads are looked through, and the age from which they are removed, in seconds.
        **launch: passed on to gradio's ``launch``; a ``server_port`` of 0 takes a free one.
    """
    with (
        temporary_folder() as folder,
        mock.patch.dict(os.environ, _settings(folder)),
        mock.patch.object(Block, "async_move_resource_to_block_cache", no_downloads),
    ):
        uploads = Uploads(folder, upload_space * 2**20)
        samples = folder / "samples"
        samples.mkdir()
        demo = build(Service(models, offer, uploads), samples)
        uploads.keep_present()
        _launch(
            demo,
            app_kwargs={"middleware": [Middleware(Gate, uploads=uploads)]},
            prevent_thread_lock=True,
            quiet=True,
            css_paths=_CSS,
            theme=gr.themes.Default(primary_hue="emerald", neutral_hue="gray", font=_FONTS, font_mono=_MONO),
            footer_links=["api"],
            max_file_size=LARGEST_UPLOAD * 2**20,
            enable_monitoring=False,
            run_history=False,
            ssr_mode=False,
            state_session_capacity=200,
            show_error=False,
            mcp_server=False,
            **{"share": False, **launch},
        )
        try:
            with uploads.removing(*removal):
                yield demo
        finally:
            uploads.remove(age=0)  # at once: closing may wait for pages that are open
            demo.close(verbose=False)


def _settings(folder: Path) -> dict[str, str]:
    return {
        "GRADIO_TEMP_DIR": str(folder),
        "GRADIO_EXAMPLES_CACHE": str(folder / "examples"),  # by default a folder below the current one, which is served
        # gradio sums up its own records anew after every request, for a page that is switched off here.
        "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(10**9),
    }


def _launch(demo: gr.Blocks, *, server_name: str = "127.0.0.1", server_port: int = 0, **options: Any) -> None:
    """Launch at a port. A free one may be taken by another process before the server has it: then try the next."""
    for attempt in range(_PORTS):
        port = _bound(server_name, server_port)
        try:
            demo.launch(server_name=server_name, server_port=port, **options)
            return
        except OSError:
            if server_port or attempt == _PORTS - 1:
                raise


def _bound(host: str, port: int) -> int:
    """The port that a socket gets there; the system says at once, and best, why there is none."""
    address = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])
