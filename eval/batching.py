"""Throughput of many requests: ``python -m mmspec.eval batching``.

Held-out scenes are captioned and asked about, so that answers differ in length. Every method answers all requests, the
methods interleaved for several rounds; a method's time is its median, and its tokens must be those of one request at a
time. "n slots" decodes n requests at a time, the next one joining as soon as another has ended; "groups of n" answers n
requests, then the next n.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import mmspec
from mmspec.engine.calibrate import describe
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.interleaved import interleaved_medians
from mmspec.eval.harness.output import benchmark, make_table, wide_console
from mmspec.eval.harness.prompts import mixed_requests


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--requests", "count", default=64, show_default=True)
@click.option("--slots", default="8,32", show_default=True, help="Batch sizes.")
@click.option("--drafters", default="auto", show_default=True, help="Drafters, in addition to plain decoding.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
def main(model: str, count: int, slots: str, drafters: str, rounds: int, max_new_tokens: int) -> dict[str, Any]:
    """Measure tokens per second of many requests: a table, then one JSON line."""
    plain = mmspec.load(model, drafter=None)
    requests = mixed_requests(count)
    methods: dict[tuple[str, str], tuple[mmspec.Pipeline, int]] = {}
    for name, drafter in {"plain": None, **parse_drafters(drafters, str(plain.model.config.name_or_path))}.items():
        sizes = [1, *map(int, slots.split(","))]
        for size in sizes:
            # A fork has an engine of its own: pipelines over one target share the largest batch size.
            pipe = mmspec.Pipeline(plain.target.fork(), plain.io, drafter, max_num_seqs=size)
            methods[name, f"{size} slots" if size > 1 else "one at a time"] = pipe, count
            if size > 1:
                methods[name, f"groups of {size}"] = pipe, size
    answers: dict[tuple[str, str], list[list[int]]] = {}

    def answer_all(key: tuple[str, str]) -> None:
        pipe, group = methods[key]
        parts = [requests[first : first + group] for first in range(0, count, group)]
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": 0.0}
        answers[key] = [answer.token_ids for part in parts for answer in pipe.generate_batch(part, **options)]

    seconds = interleaved_medians({key: partial(answer_all, key) for key in methods}, rounds)
    expected = answers["plain", "one at a time"]
    tokens = sum(map(len, expected))
    rates = {key: tokens / spent for key, spent in seconds.items()}
    rows = [
        {
            "drafter": drafter,
            "method": method,
            "tokens_per_second": rate,
            "over_one_at_a_time": rate / rates[drafter, "one at a time"],
            "equal": sum(a == b for a, b in zip(answers[drafter, method], expected, strict=True)),
        }
        for (drafter, method), rate in rates.items()
    ]
    columns = [
        ("drafter", "{drafter}"),
        ("method", "{method}"),
        ("tokens/s", "{tokens_per_second:.0f}"),
        ("over one at a time", "{over_one_at_a_time:.2f}"),
        ("equal", "{equal}"),
    ]
    wide_console().print(make_table(columns, rows, sections=["drafter"], title=f"{count} requests, {tokens} tokens"))
    return {**describe(plain.target), "requests": count, "tokens": tokens, "rounds": rounds, "methods": rows}
