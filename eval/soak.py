"""Memory of a server that runs for long: ``python -m mmspec.eval soak``.

The same mix of requests is sent again and again, with other texts of the same lengths. After each load, once no request
runs, the resident memory is read; a load's peak is that since it began.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, benchmark, make_table, mebibytes, wide_console
from mmspec.eval.harness.prompts import held_out_requests
from mmspec.eval.harness.timing import memory_of, reset_peak_memory_of
from mmspec.eval.serving import chat_body, serving
from mmspec.eval.suite import SIZES
from mmspec.http_client import open_client

_LEFT_AFTER = 3  # lines after which a client leaves its stream
_PAUSE = 2.0  # seconds between the last answer and the memory reading
_TOOL = {
    "type": "function",
    "function": {"name": "note", "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}}},
}
_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
_MIXES: Sequence[dict[str, Any]] = (
    {},
    {"n": 3, "temperature": 1.0, "seed": 1},
    {"tools": [_TOOL], "tool_choice": "required"},
    {"stream": True},  # left by its client
    {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": _SCHEMA}}},
    {"stream": False, "temperature": 0.7, "top_p": 0.8, "seed": 2},
    {"speculative": False},
    {"speculative": False, "tools": [_TOOL], "tool_choice": "required"},
    {"speculative": True, "num_draft_tokens": 1, "temperature": 1.5, "seed": 3, "n": 2},
    {"num_draft_tokens": 0, "temperature": 1.5, "seed": 4},
    {"num_draft_tokens": 9, "frequency_penalty": 1.0, "stop": ["e", "4"]},
    {"num_draft_tokens": 64},
)


def load_bodies(
    model: str, number: int, words: Sequence[int], tokens: int, images: Sequence[Any], drafters: Sequence[str] = ()
) -> list[Any]:
    """The requests of a load.

    Args:
        number: of the load; it starts the texts.
        words: prompt lengths; all kinds of requests are sent for each length, and a request for each drafter.
        images: of further requests, one each.
    """
    bodies = []
    for place, length in enumerate(words):
        first = f"{number} {place}: " + " ".join(str(one) for one in range(length))
        for kind, mix in enumerate((*_MIXES, *({"speculative": name} for name in drafters))):
            messages = [{"role": "user", "content": f"{kind} {first}"}]
            if kind % 2:
                messages += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "Go on."}]
            bodies.append({"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, **mix})
    for image in images:
        request = {"prompt": f"{number}: What is this?", "images": [image]}
        bodies.append({**chat_body(model, request, tokens), "stream": False, "stream_options": None})
    return bodies


def send(url: str, bodies: Sequence[Any], clients: int) -> int:
    """Send the requests of a load; returns the number of responses with a status other than 200."""

    def is_wrong(body: Any) -> bool:
        if not body.get("stream"):
            return http.post("/chat/completions", json=body).status_code != 200
        with http.stream("POST", "/chat/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(_LEFT_AFTER):
                next(lines, None)
            return response.status_code != 200

    with open_client(url) as http, ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(is_wrong, bodies))


def compare_settled(rows: Sequence[dict[str, Any]], settled: float) -> float:
    """Add ``over_settled`` to the rows of loads: ratio of resident memory to the first load after ``settled`` minutes.
    Returns its maximum."""
    level = next((row for row in rows if row["minutes"] >= settled), rows[-1])
    for row in rows:
        row["over_settled"] = row["resident"] / level["resident"]
    return float(max(row["over_settled"] for row in rows if row["minutes"] >= level["minutes"]))


@benchmark
@click.option("--model", default="smollm2", show_default=True)
@click.option("--drafter", multiple=True, default=("auto", "ngram@chain"), show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--minutes", default=60.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--settled", default=10.0, show_default=True, help="Minutes after which memory must stay as it is.")
@click.option("--clients", default=8, show_default=True, type=click.IntRange(1))
@click.option("--words", default="4,40,400", show_default=True, type=SIZES, help="Lengths of prompts.")
@click.option(
    "--images", default=4, show_default=True, type=click.IntRange(0), help="Of a load, for a model with eyes."
)
@click.option("--max-new-tokens", default=48, show_default=True, type=click.IntRange(1))
@click.option("--prefix-cache", default=512, show_default=True, type=click.IntRange(0), help="MiB.")
@click.option("--most", default=1.05, show_default=True, help="Exit status 1 beyond so many times the settled memory.")
def main(
    minutes: float,
    settled: float,
    clients: int,
    words: Sequence[int],
    images: int,
    max_new_tokens: int,
    most: float,
    **options: Any,
) -> dict[str, Any]:
    """Send equal loads for minutes, with the server's memory after each: a table, then one JSON line."""
    rows: list[dict[str, Any]] = []
    with serving(**options, max_waiting=clients * 4) as server:
        started = time.monotonic()
        with open_client(server.url) as http:
            (about,) = http.get("/models").json()["data"]
        pictures = [one["images"][0] for one in held_out_requests("mixed", images) if one["images"]]
        refused = send(server.url, load_bodies(about["id"], 0, (), 1, pictures[:1]), 1)
        pictures = [] if refused else pictures  # a text-only model
        while (now := (time.monotonic() - started) / 60) < minutes or len(rows) < 2:
            reset_peak_memory_of(server.pid)
            bodies = load_bodies(about["id"], len(rows), words, max_new_tokens, pictures, options["drafter"][1:])
            wrong = send(server.url, bodies, clients)
            time.sleep(_PAUSE)
            resident, peak = (memory_of(server.pid, name) for name in ("VmRSS", "VmHWM"))
            if resident is None or peak is None:
                raise UserError("the memory of a process is read from /proc: this system has none")
            rows.append({"minutes": now, "resident": resident, "peak": peak, "requests": len(bodies), "wrong": wrong})
            click.echo(f"{now:.1f} minutes: {resident >> 20} MiB, peak {peak >> 20} MiB", err=True)
    highest = compare_settled(rows, settled)
    columns: list[Column] = [
        ("minutes", "{minutes:.1f}"),
        ("resident MiB", mebibytes("resident")),
        ("over settled", "{over_settled:.3f}"),
        ("peak MiB", mebibytes("peak")),
        ("wrong", "{wrong}/{requests}"),
    ]
    wide_console().print(make_table(columns, rows, title=f"{len(rows)} loads, settled after {settled:g} minutes"))
    failed = highest > most or any(row["wrong"] for row in rows)
    return {**options, "clients": clients, "loads": rows, "over_settled": highest, "failed": failed}
