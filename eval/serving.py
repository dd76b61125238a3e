"""Load test of the server: ``python -m mmspec.eval serving``.

Captions and questions about held-out scenes, every fourth of them without its image (texts for a text model), are sent
by closed-loop clients, interleaved for several rounds. A load's throughput is its median, and its other metrics are
over the requests of all rounds. Every answer must equal plain decoding's.

Times are client-side and include HTTP and queueing. Inter-token latency is the time between chunks of text: a decode
step may emit several tokens, so the time per token is smaller.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import pairwise
from statistics import median
from time import perf_counter as clock
from typing import Any

import click
import httpx
import numpy as np
import torch

import mmspec
from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, benchmark, describe, make_table, milliseconds, wide_console
from mmspec.eval.harness.prompts import held_out_requests
from mmspec.eval.harness.timing import memory_of, reset_peak_memory_of
from mmspec.eval.suite import SIZES
from mmspec.http_client import open_client, stream_json


@dataclass(frozen=True)
class RunningServer:
    """A server process, and the base URL of its API."""

    url: str
    pid: int


@contextmanager
def serving(**options: Any) -> Iterator[RunningServer]:
    """Run ``mmspec serve`` on a free port, with torch's number of threads and options; None omits an option, a tuple
    repeats it."""
    program = [sys.executable, "-m", "mmspec", "serve", "--port=0"]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        program += [f"--{name.replace('_', '-')}={one}" for one in values if one is not None]
    environment, pipe = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}, subprocess.PIPE
    with subprocess.Popen(program, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
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
    """Client-side measurements of one request: seconds until the ``first`` text and until the end, and between later
    chunks of text (``gaps``), which have the tokens of a decode step; the server's ``metrics`` of speculation."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)


Round = tuple[list[StreamedRequest], float, int | None]
"""A load's measured requests, total seconds, and the server's peak memory in bytes."""


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
    """Send requests from several closed-loop clients: each waits for an answer before its next request. Returns the
    measured requests, in the order of ``bodies``, and the total seconds."""
    with open_client(url) as http, ThreadPoolExecutor(clients) as pool:
        started = clock()
        seen = list(pool.map(partial(_stream, http), bodies))
        return seen, clock() - started


def _stream(http: httpx.Client, body: Mapping[str, Any]) -> StreamedRequest:
    request, started, times = StreamedRequest(), clock(), list[float]()
    for chunk in stream_json(http, "/chat/completions", body):
        text = "".join(choice["delta"]["content"] for choice in chunk["choices"])
        if text:
            times.append(clock() - started)
        request.text += text
        if chunk.get("usage"):
            request.tokens = chunk["usage"]["completion_tokens"]
            request.metrics = chunk["metrics"]["speculative_decoding"]
    request.seconds = clock() - started
    request.first = times[0] if times else 0.0
    request.gaps = [after - before for before, after in pairwise(times)]
    return request


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--requests", "count", default=64, show_default=True, type=click.IntRange(1))
@click.option("--clients", default="1,4,8,16", show_default=True, type=SIZES)
@click.option("--max-running", default=8, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(1))
def main(count: int, clients: Sequence[int], rounds: int, max_new_tokens: int, **options: Any) -> dict[str, Any]:
    """Measure throughput and latency of the server under load: a table, then one JSON line."""
    plain = mmspec.load(options["model"], drafter=None, dtype=options["dtype"])
    requests = held_out_requests("mixed" if plain.processor.reads_media else "prompts", count)
    for number, request in enumerate(requests):
        if number % 4 == 3:
            request["images"] = None
    expected = [plain.generate(**request, max_new_tokens=max_new_tokens, temperature=0.0).text for request in requests]
    bodies = [chat_body(plain.name, request, max_new_tokens) for request in requests]
    loads: dict[int, list[Round]] = {size: [] for size in clients}
    with serving(**options, max_waiting=max(clients), max_tokens=max_new_tokens) as server:
        load(server.url, bodies[:4], 2)  # warms up
        for _ in range(rounds):
            for size in clients:
                reset_peak_memory_of(server.pid)
                seen, seconds = load(server.url, bodies, size)
                loads[size].append((seen, seconds, memory_of(server.pid, "VmHWM")))
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
    wide_console().print(make_table(columns, rows, title=f"{count} requests, at most {options['max_running']} running"))
    return {**options, **describe(plain.target), "requests": count, "rounds": rounds, "loads": rows}


def _row(clients: int, rounds: Sequence[Round], expected: Sequence[str]) -> dict[str, Any]:
    seen = [request for requests, _, _ in rounds for request in requests]
    gaps, first = [gap for request in seen for gap in request.gaps], [request.first for request in seen]
    accepted, steps = (
        sum(request.metrics[name] for request in seen) for name in ("num_accepted_draft_tokens", "num_spec_steps")
    )
    later = [(one.seconds - one.first) / (one.tokens - 1) for one in seen if one.tokens > 1]
    peaks = [peak for _, _, peak in rounds if peak is not None]
    return {
        "clients": clients,
        "tokens_per_second": median(sum(one.tokens for one in part) / spent for part, spent, _ in rounds),
        "first_token_seconds": median(first),
        "first_token_seconds_90": float(np.percentile(first, 90)),
        "inter_token_seconds": median(gaps) if gaps else None,
        "inter_token_seconds_90": float(np.percentile(gaps, 90)) if gaps else None,
        "token_seconds": median(later) if later else None,
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "peak_mebibytes": max(peaks) / 2**20 if peaks else None,
        "answers": len(seen),
        "equal": sum(one.text == text for one, text in zip(seen, [*expected] * len(rounds), strict=True)),
    }
