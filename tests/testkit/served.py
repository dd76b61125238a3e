"""A server of ``mmspec serve`` in a thread of the test, and requests to it."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from fastapi import FastAPI

from mmspec.drafters.registry import PLAIN, registered_name
from mmspec.pipeline import Pipeline
from mmspec.serving.app import create_app
from mmspec.serving.server import Server, listen
from mmspec.serving.settings import Limits
from mmspec.vision.embedded import samples

SCENE, CLIP = samples() / "scene.png", samples() / "clip.mp4"
QUESTION = "Describe the image."
LONG = {"temperature": 5.0, "seed": 11, "max_tokens": 2000}
"""Sampling of an answer of at least 800 tokens, with and without the scene."""

TIMEOUT = 120  # seconds; reached only if something hangs


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        url: its address, without a path.
        app: the application.
        pipe: what answers.
    """

    url: str
    app: FastAPI
    pipe: Pipeline

    def post(self, body: dict[str, Any], path: str = "chat/completions", **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=TIMEOUT, **options)

    @property
    def idle(self) -> bool:
        """Whether no choice runs or waits, in the server and in the engine."""
        slots, engine = self.app.state.slots, self.pipe.engine
        return not (slots.running or slots.waiting or engine.core.running or engine.core.queued)


@contextmanager
def served(pipe: Pipeline, limits: Limits | None = None, drafters: Any = None, **options: Any) -> Iterator[Served]:
    """Run a server on a free port."""
    limits = limits or Limits()
    app = create_app(drafters or {registered_name(pipe.drafter) or PLAIN: pipe}, limits, **options)
    with listen("127.0.0.1", 0) as listening:
        server = Server(app, limits)
        thread = Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            assert eventually(lambda: server.started)
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", app, pipe)
        finally:
            server.should_exit = True
            thread.join()


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether a condition comes true; gives up after ``TIMEOUT``."""
    end = time.monotonic() + TIMEOUT
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def data_uri(path: Path, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def question(text: str = QUESTION, *images: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat request about images."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    content: Any = [*parts, {"type": "text", "text": text}] if images else text
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny-llava", "messages": messages, "temperature": 0, "max_tokens": 16, **fields}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose end is checked."""
    assert response.status_code == 200, response.text
    *lines, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts(response: httpx.Response) -> list[str]:
    """The texts of the choices of a response or a stream, by their index."""
    assert response.status_code == 200, response.text
    streamed = response.headers["content-type"].startswith("text/event-stream")
    found: dict[int, str] = {}
    for chunk in events(response) if streamed else [response.json()]:
        for choice in chunk["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            text = choice["text"] if "text" in choice else message.get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + text
    assert sorted(found) == list(range(len(found)))
    return [found[index] for index in range(len(found))]


def open_stream(server: Served, body: dict[str, Any]) -> socket.socket:
    """A raw connection whose request has been sent."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection
