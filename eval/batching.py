"""Goodput by batch size: ``python -m mmspec.eval batching``.

Goodput is the number of accepted and bonus tokens per second of a batch (SmartSpec, arXiv 2406.14066): the larger the
batch, the less idle arithmetic is left for draft tokens. All requests are decoded plainly and with trees of several
sizes, fixed and adaptive, for each batch size, the next request joining as soon as another has ended. Methods are
interleaved for several rounds; a method's time is its median, prefill included, and its tokens must equal plain
decoding of one request at a time. The adaptive policy chooses one size per verify pass, for all of its sequences.

Requests are captions of held-out scenes and questions about them, texts for a text model, so that answers differ in
length. Each batch size has a fork of the target, as pipelines over one target share an engine. Drafters and policies
learn from other requests first, and start every round in the same state.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

import mmspec
from mmspec.engine.stats import Stats
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.output import SIZES, Column, benchmark, make_table, wide_console
from mmspec.eval.harness.passes import describe
from mmspec.eval.harness.prompts import held_out_texts, mixed_requests
from mmspec.eval.harness.timing import PLAIN, DecodingOptions, Method, TimedBatch, drafter_methods, run_interleaved


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--drafters", default="auto", show_default=True, help="Names or folders, see mmspec.eval.speed.")
@click.option("--batch", "sizes", type=SIZES, default="1,2,4,8,16,32", show_default=True, help="Batch sizes.")
@click.option("--nodes", default="4,16", show_default=True, help="Tree sizes, in addition to the adaptive one.")
@click.option("--requests", "count", type=click.IntRange(1), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, show_default=True)
def main(
    model: str,
    dtype: str,
    drafters: str,
    sizes: Sequence[int],
    nodes: str,
    count: int,
    rounds: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Measure goodput by batch size: a table, then one JSON line."""
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    methods = _methods(pipe, drafters, sizes, nodes)
    draw = mixed_requests if pipe.processor.reads_media else held_out_texts
    drawn = draw(count + max(sizes))
    requests, others = drawn[:count], drawn[count:]
    options = DecodingOptions(max_new_tokens)
    expected = [pipe.generate(**request, **vars(options)).token_ids for request in requests]
    run_interleaved(pipe, others, list(methods.values()), 1, options)
    batches = run_interleaved(pipe, requests, list(methods.values()), rounds, options)
    rows = [
        {"batch": size, "method": name, **_figures(batches[one.name], expected)}
        for (size, name), one in methods.items()
    ]
    plain = {row["batch"]: row["tokens_per_second"] for row in rows if row["method"] == PLAIN}
    for row in rows:
        row["over_plain"] = row["tokens_per_second"] / plain[row["batch"]]
    columns: list[Column] = [
        ("batch", "{batch}"),
        ("method", "{method}"),
        ("tokens/s", "{tokens_per_second:.0f}"),
        ("over plain", "{over_plain:.2f}"),
        ("tokens per step", "{mean_acceptance_length:.2f}"),
        ("nodes per step", "{draft_tokens_per_step:.1f}"),
        ("equal", "{equal}/{answers}"),
    ]
    tokens = sum(map(len, expected))
    wide_console().print(make_table(columns, rows, sections=["batch"], title=f"{count} requests, {tokens} tokens"))
    return {
        "model": model,
        **describe(pipe.target),
        "requests": count,
        "tokens": tokens,
        "rounds": rounds,
        "methods": rows,
    }


def _methods(pipe: mmspec.Pipeline, drafters: str, sizes: Sequence[int], nodes: str) -> dict[tuple[int, str], Method]:
    """Methods by batch size and name."""
    loaded = parse_drafters(drafters, str(pipe.model.config.name_or_path))
    methods = {}
    for size in sizes:
        target = pipe.target.fork()
        for method in [Method(PLAIN), *drafter_methods(loaded, nodes, target)]:
            own = {"drafter": method.drafter and method.drafter.fork(target), "target": target, "max_num_seqs": size}
            methods[size, method.name] = replace(method, name=f"{method.name}, batch {size}", **own)
    return methods


def _figures(batches: Sequence[TimedBatch], expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    last = batches[-1]
    steps = Stats.combined(last.stats)
    return {
        "tokens_per_second": sum(map(len, last.answers))
        / statistics.median(batch.seconds["total"] for batch in batches),
        "mean_acceptance_length": steps.mean_acceptance_length,
        "draft_tokens_per_step": steps.num_draft_tokens / max(steps.num_spec_steps, 1),
        "answers": len(expected),
        "equal": min(sum(a == b for a, b in zip(batch.answers, expected, strict=True)) for batch in batches),
    }
