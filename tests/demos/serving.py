"""A demo for tests: a real server in this process, one at a time, on a free port; and what is sent to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np

from demos.models import Models
from demos.offer import offer
from demos.server import serving

SHORT = {"max_new_tokens": 12}
PATIENCE = 600  # seconds; only what hangs reaches it


@contextmanager
def demo_server(**options: Any) -> Iterator[str]:
    """Its address, while it listens."""
    with serving(Models(device="cpu"), options.pop("offered", offer()), server_port=0, **options) as page:
        yield page.local_url


def ten_minutes(path: Path) -> str:
    """Writes a video of 600 s and three frames; returns its path."""
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
    return httpx.post(f"{url}gradio_api/upload", files={"files": ("a.png", content)}, timeout=PATIENCE, **options)


def stored(url):
    """The path that the server gives to an upload."""
    return upload(url).json()[0]
