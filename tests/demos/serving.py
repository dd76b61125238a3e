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
from mmspec.demos.catalog import Catalog
from mmspec.demos.models import ModelCache
from mmspec.demos.server import run_server

SHORT = {"max_new_tokens": 12}
TIMEOUT = 600  # seconds; reached only if something hangs


def embedded_catalog() -> Catalog:
    made = Catalog.of(["tiny-llava"])
    return replace(made, models=tuple(name for name in made.models if not plugins.sees_photographs(name)))


@contextmanager
def demo_server(**options: Any) -> Iterator[str]:
    given = {"models": ModelCache(device="cpu"), "catalog": embedded_catalog(), **options}
    with run_server(**given) as page:
        yield page.local_url


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_video(path: Path, codec: str, size: tuple[int, int], seconds: int = 2) -> str:
    """Write a video that is black in its first half and white in its second; returns its path."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(10 * seconds):
            grey = np.full((size[1], size[0], 3), 255 * (number >= 5 * seconds), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


def upload(url, content=b"an upload", **options):
    return httpx.post(f"{url}gradio_api/upload", files={"files": ("a.png", content)}, timeout=TIMEOUT, **options)


def stored_path(url):
    return upload(url).json()[0]
