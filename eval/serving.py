"""Load test of the server: ``python -m mmspec.eval serving``.

``mmspec serve`` runs in a process of its own. Captions and questions about held-out scenes, every fourth of them
without its image (texts for a text model), are sent by 1, 4, 8 and 16 clients, each of which sends its next request
when its last has been answered; one client is the same requests one after the other. Loads are interleaved for several
rounds; a load's throughput is its median, and its other metrics are over the requests of all rounds. Every answer must
equal plain decoding's.

Time to first token and inter-token latency are client-side and include HTTP and queueing. Inter-token
latency is the time between chunks of text: a decode step may emit several tokens, so the time per token is smaller.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from time import perf_counter as clock
from typing import Any

import click
import httpx
import numpy as np

import mmspec
from mmspec.errors import UserError
from mmspec.eval.harness.output import SIZES, Column, benchmark, make_table, milliseconds, wide_console
from mmspec.eval.harness.passes import describe
from mmspec.eval.harness.prompts import held_out_texts, mixed_requests
from mmspec.eval.harness.timing import peak_memory_of, reset_peak_memory_of

_TIMEOUT = 600.0  # seconds, for each request


@dataclass(frozen=True)
class RunningServer:
    """A server process.

    Attributes:
        url: base URL of the API, as printed.
        pid: process id.
    """

    url: str
    pid: int


@contextmanager
def serving(**options: Any) -> Iterator[RunningServer]:
    """Run ``mmspec serve`` on a free port.

    Args:
        **options: command options; None omits an option, a tuple repeats it.

    Raises:
        UserError: the server does not start; contains the server's message.
    """
    given = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    program = [sys.executable, "-m", "mmspec", "serve", "--port=0"]
    for name, value in given.items():
        program += [f"--{name}={one}" for one in (value if isinstance(value, tuple) else (value,))]
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
    """Client-side measurements of one request.

    Attributes:
        text: the answer.
        tokens: generated tokens.
        first: seconds until the first text.
        gaps: seconds between later chunks of text; a chunk has the tokens of a decode step.
        seconds: seconds until the end.
        figures: the server's speculative decoding metrics.
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
    """Send requests from several closed-loop clients: each waits for an answer before its next request.

    Returns:
        The measured requests, in the order of ``bodies``, and the total seconds.

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


_WARM_UP = 4  # requests


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--requests", "count", default=64, show_default=True, type=click.IntRange(1))
@click.option("--clients", default="1,4,8,16", show_default=True, type=SIZES)
@click.option("--max-running", default=8, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(1))
def main(
    model: str,
    drafter: str,
    dtype: str,
    count: int,
    clients: Sequence[int],
    max_running: int,
    rounds: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Measure throughput and latency of the server under load: a table, then one JSON line."""
    plain = mmspec.load(model, drafter=None, dtype=dtype)
    requests = mixed_requests(count) if plain.processor.reads_media else held_out_texts(count)
    for number, request in enumerate(requests):
        if number % 4 == 3:
            request["images"] = None
    expected = [plain.generate(**request, max_new_tokens=max_new_tokens, temperature=0.0).text for request in requests]
    bodies = [chat_body(plain.name, request, max_new_tokens) for request in requests]
    options = {"model": model, "drafter": drafter, "dtype": dtype, "max_running": max_running}
    loads: dict[int, list[tuple[list[StreamedRequest], float, int | None]]] = {size: [] for size in clients}
    with serving(**options, max_waiting=max(clients), max_tokens=max_new_tokens) as server:
        load(server.url, bodies[:_WARM_UP], 2)
        for _ in range(rounds):
            for size in clients:
                loads[size].append(_measured(server, bodies, size))
    rows = [_row(size, measured, expected) for size, measured in loads.items()]
    for row in rows:
        row["over_one"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    columns: list[Column] = [
        ("clients", "{clients}"),
        ("tokens/s", "{tokens_per_second:.0f}"),
        (f"over {clients[0]}", "{over_one:.2f}"),
        ("first token ms", milliseconds("first_token_seconds", 0)),
        ("90 %", milliseconds("first_token_seconds_90", 0)),
        ("between chunks ms", milliseconds("inter_token_seconds")),
        ("90 %", milliseconds("inter_token_seconds_90")),
        ("ms/token", milliseconds("token_seconds")),
        ("acceptance length", "{mean_acceptance_length:.2f}"),
        ("peak MiB", "{peak_mebibytes:.0f}"),
        ("equal", "{equal}/{answers}"),
    ]
    wide_console().print(make_table(columns, rows, title=f"{count} requests, at most {max_running} running"))
    return {**options, **describe(plain.target), "requests": count, "rounds": rounds, "loads": rows}


def _measured(
    server: RunningServer, bodies: Sequence[dict[str, Any]], clients: int
) -> tuple[list[StreamedRequest], float, int | None]:
    """Measured requests of one load, total seconds, and the server's peak memory in bytes."""
    reset_peak_memory_of(server.pid)
    seen, seconds = load(server.url, bodies, clients)
    return seen, seconds, peak_memory_of(server.pid)


def _row(
    clients: int, found: Sequence[tuple[list[StreamedRequest], float, int | None]], expected: Sequence[str]
) -> dict[str, Any]:
    seen = [request for requests, _, _ in found for request in requests]
    gaps = [gap for request in seen for gap in request.gaps]
    accepted, steps = (
        sum(request.figures[name] for request in seen) for name in ("num_accepted_draft_tokens", "num_spec_steps")
    )
    peaks = [peak for _, _, peak in found if peak is not None]
    answers = [request.text for request in seen]
    return {
        "clients": clients,
        "tokens_per_second": statistics.median(
            sum(request.tokens for request in part) / spent for part, spent, _ in found
        ),
        "first_token_seconds": statistics.median(request.first for request in seen),
        "first_token_seconds_90": float(np.percentile([request.first for request in seen], 90)),
        "inter_token_seconds": statistics.median(gaps) if gaps else None,
        "inter_token_seconds_90": float(np.percentile(gaps, 90)) if gaps else None,
        "token_seconds": statistics.median(
            request.token_seconds for request in seen if request.token_seconds is not None
        ),
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "peak_mebibytes": max(peaks) / 2**20 if peaks else None,
        "answers": len(answers),
        "equal": sum(a == b for a, b in zip(answers, [*expected] * len(found), strict=True)),
    }
