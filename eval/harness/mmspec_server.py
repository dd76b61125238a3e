"""``mmspec serve`` in a process of its own, and clients that load the server."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from time import perf_counter as clock
from typing import Any

import httpx

from mmspec.errors import UserError

_TIMEOUT = 600.0  # seconds, for each request


@dataclass(frozen=True)
class RunningServer:
    """A server process.

    Attributes:
        url: base URL of the API, as printed.
        pid: of the process.
    """

    url: str
    pid: int


@contextmanager
def serving(**options: Any) -> Iterator[RunningServer]:
    """Run ``mmspec serve`` on a free port.

    Args:
        **options: of the command; None leaves an option out.

    Raises:
        UserError: the server does not start, with its own message.
    """
    arguments = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    program = [sys.executable, "-m", "mmspec", "serve", "--port=0"]
    program += [f"--{name}={value}" for name, value in arguments.items()]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            match = re.search(r"http://\S+", process.stdout.readline())
            if match is None:
                lines = process.stderr.read().strip().splitlines()
                raise UserError(lines[-1].removeprefix("error: ") if lines else "the server did not start")
            yield RunningServer(match[0], process.pid)
        finally:
            process.terminate()
            process.communicate()


@dataclass
class StreamedRequest:
    """What a client saw of one request.

    Attributes:
        text: the answer.
        tokens: generated tokens.
        first: seconds until the first text.
        gaps: seconds between later chunks of text; a chunk has the tokens of a decode step.
        seconds: until the end.
        figures: the server's figures of speculative decoding.
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def token_seconds(self) -> float | None:
        """Seconds per token after the first; None for answers of one token."""
        return (self.seconds - self.first) / (self.tokens - 1) if self.tokens > 1 else None


def chat_body(model: str, request: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """The greedy, streamed chat request for a request of ``Pipeline.generate``, whose images are Pillow's."""
    content: list[dict[str, Any]] = []
    for image in request.get("images") or ():
        file = BytesIO()
        image.save(file, "png")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": request["prompt"]})
    sampling = {"temperature": 0, "max_tokens": max_new_tokens, "stream": True}
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, **sampling, "stream_options": {"include_usage": True}}


def load(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> tuple[list[StreamedRequest], float]:
    """Send requests from several clients, each of which sends its next one when its last has been answered.

    Returns:
        What the clients saw, in the order of ``bodies``, and the seconds that all took.

    Raises:
        RuntimeError: the server refused a request.
    """
    return asyncio.run(_load(url, bodies, clients))


async def _load(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> tuple[list[StreamedRequest], float]:
    seen: dict[int, StreamedRequest] = {}
    left = iter(enumerate(bodies))
    limits = httpx.Limits(max_connections=clients)

    async def client(http: httpx.AsyncClient) -> None:
        for number, body in left:
            seen[number] = await _stream(http, f"{url}/chat/completions", body)

    async with httpx.AsyncClient(timeout=_TIMEOUT, limits=limits) as http:
        started = clock()
        await asyncio.gather(*(client(http) for _ in range(clients)))
        seconds = clock() - started
    return [seen[number] for number in range(len(bodies))], seconds


async def _stream(http: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> StreamedRequest:
    request, started, before = StreamedRequest(), clock(), None
    async with http.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                text = choice["delta"]["content"]
                if text:
                    now = clock()
                    if before is None:
                        request.first = now - started
                    else:
                        request.gaps.append(now - before)
                    before = now
                request.text += text
            if chunk.get("usage"):
                request.tokens = chunk["usage"]["completion_tokens"]
                request.figures = chunk["metrics"]["speculative_decoding"]
    request.seconds = clock() - started
    return request
