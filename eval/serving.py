"""Load test of the server: ``python -m mmspec.eval serving``.

``mmspec serve`` runs in a process of its own. Captions and questions about held-out scenes, every fourth of them
without its image (texts for a text model), are sent by 1, 4, 8 and 16 clients, each of which sends its next request
when its last has been answered; one client is the same requests one after the other. Loads are interleaved for several
rounds; a load's throughput is its median, and its other figures are over the requests of all rounds. Every answer must
be that of plain decoding alone.

Time to first token and inter-token latency are what a client sees, HTTP and the wait for a slot included. Inter-token
latency is the time between chunks of text: a decode step may emit several tokens, so the time per token is smaller.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

import mmspec
from mmspec.engine.calibrate import describe
from mmspec.eval.harness.measuring import peak_memory_of, reset_peak_memory_of
from mmspec.eval.harness.mmspec_server import RunningServer, StreamedRequest, chat_body, load, serving
from mmspec.eval.harness.options import SIZES
from mmspec.eval.harness.output import Column, benchmark, make_table, milliseconds, wide_console
from mmspec.eval.harness.prompts import held_out_texts, mixed_requests

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
    """What the clients of one load saw, its seconds, and the server's peak memory in bytes."""
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
