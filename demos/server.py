"""The server: limits, temporary files, and how it is reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import gradio as gr

from demos.models import Models
from demos.page import build
from demos.questions import LARGEST_UPLOAD
from demos.service import Service

_CSS = Path(__file__).with_name("style.css")
_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "Menlo", "Consolas", "monospace"]


@contextmanager
def serving(models: Models, *, page: dict[str, Any] | None = None, **launch: Any) -> Iterator[gr.Blocks]:
    """The demo, listening until the block ends; uploads live in a folder of its own that goes with it.

    Args:
        models: what answers.
        page: passed on to ``build``.
        **launch: passed on to gradio's ``launch``; a ``server_port`` of 0 takes a free one.
    """
    with TemporaryDirectory(prefix="mmspec-demo-") as folder, mock.patch.dict(os.environ, _settings(folder)):
        samples = Path(folder, "samples")
        samples.mkdir()
        demo = build(Service(models), samples, **(page or {}))
        demo.launch(
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
            **{"share": False, **launch, "server_port": launch.get("server_port") or _free_port()},
        )
        try:
            yield demo
        finally:
            demo.close()


def _settings(folder: str) -> dict[str, str]:
    # Without the second, gradio sums up its own records anew after every request, for a page that is switched off here.
    return {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(10**9)}


def _free_port() -> int:
    """Asked of the system: gradio's own search leaves a socket open for every port that it finds taken."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
