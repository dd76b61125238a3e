"""Speedup over plain decoding: ``python -m mmspec.eval speed``.

Every prompt is decoded with all methods, interleaved, for several rounds on one model in one process. A method's time
is its median over the rounds, and its output must equal transformers' ``generate``. Ratios are of whole
requests (vision tower and prefill included) and of decoding alone.

All methods first decode a few other prompts. A drafter that learns from earlier answers, and its policy, start every
round of a prompt in the same state, so no prompt is drafted from its own answer. With ``--prompts``, the prompts of a
file take the place of held-out captions; the first ones warm up.

A second table shows where the time goes: the shares of prefill, drafting, verification and commit in a whole request,
and the cost of drafting one tree in one-token passes of the target, timed on the same prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import mmspec
from mmspec.cli.options import FILE
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.output import Column, benchmark, make_table, milliseconds, wide_console
from mmspec.eval.harness.passes import describe
from mmspec.eval.harness.prompts import held_out_requests, warm_up_requests
from mmspec.eval.harness.timing import (
    PHASES,
    PLAIN,
    TRANSFORMERS,
    Method,
    compare_methods,
    drafter_methods,
    time_ratios,
    warm_up_methods,
)
from mmspec.eval.suite.race import read_requests
from mmspec.eval.suite.tasks import TASKS


def print_speed_tables(methods: Sequence[Method], console: Console) -> list[dict[str, Any]]:
    """Print speedups and time breakdown of measured methods.

    Args:
        methods: must include plain decoding; transformers' ``generate`` is optional.

    Returns:
        One row of results per method: median and minimum over prompts of ratios in seconds per token.
    """
    by_name = {method.name: method for method in methods}
    rows = [_speed_row(method, by_name[PLAIN], by_name.get(TRANSFORMERS)) for method in methods]
    columns: list[Column] = [
        ("method", "{method}"),
        ("acceptance", "{mean_acceptance_length:.2f}"),
        ("vs HF", "{ratio_transformers:.2f}"),
        ("vs plain", "{ratio_plain:.2f}"),
        ("worst", "{ratio_plain_worst:.2f}"),
        ("decoding", "{decoding_ratio_plain:.2f}"),
        ("worst", "{decoding_ratio_plain_worst:.2f}"),
        ("equal", "{equal}/{prompts}"),
    ]
    console.print(make_table(columns, rows))
    columns = [
        ("method", "{method}"),
        *((phase, _share(phase)) for phase in (*PHASES, "rest")),
        ("ms per tree", milliseconds("tree_seconds")),
        ("tree in passes", "{tree_passes:.2f}"),
        ("verify in passes", "{pass_passes:.2f}"),
    ]
    title = "share of a request's time; cost of drafting and of verifying a tree in plain passes of the target"
    console.print(make_table(columns, [row for row in rows if "shares" in row], title=title))
    return rows


def _share(phase: str) -> Any:
    return lambda row: f"{100 * row['shares'][phase]:.0f} %"


def _speed_row(method: Method, plain: Method, transformers: Method | None) -> dict[str, Any]:
    total, decoding = time_ratios(plain, method, "total"), time_ratios(plain, method, "decoding")
    row = {
        "method": method.name,
        "mean_acceptance_length": statistics.mean(method.lengths),
        "ratio_transformers": statistics.median(time_ratios(transformers, method, "total")) if transformers else None,
        "ratio_plain": statistics.median(total),
        "ratio_plain_worst": min(total),
        "decoding_ratio_plain": statistics.median(decoding) if decoding else None,
        "decoding_ratio_plain_worst": min(decoding, default=None),
        "equal": method.equal,
        "prompts": len(method.seconds),
    }
    return row | (time_breakdown(method, plain) if method is not transformers else {})


def time_breakdown(method: Method, plain: Method) -> dict[str, Any]:
    """Shares of a request's time, and the cost of a tree.

    Returns:
        ``shares`` of a request's total time by phase, means over the prompts; ``tree_seconds`` and ``pass_seconds``,
        medians of the time to draft a tree and to verify it; ``tree_passes`` and ``pass_passes``, the same divided by
        plain decoding's time per step, by prompt, then the median.
    """
    shares = {phase: statistics.mean(s[phase] / s["total"] for s in method.seconds) for phase in PHASES}
    shares["rest"] = 1.0 - sum(shares.values())
    costs: dict[str, float] = {}
    for name in ("tree", "pass"):
        # An adaptive method may not have drafted for some prompts.
        pairs = [(a, b) for a, b in zip(method.column(name), plain.column("pass"), strict=True) if a > 0.0]
        costs[f"{name}_seconds"] = statistics.median(a for a, _ in pairs) if pairs else 0.0
        costs[f"{name}_passes"] = statistics.median(a / b for a, b in pairs) if pairs else 0.0
    return {"shares": shares, **costs}


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--images", default=24, show_default=True, help="Held-out images.")
@click.option("--several", default=0, show_default=True, help="Held-out requests with two or three images.")
@click.option("--videos", default=8, show_default=True, help="Held-out videos.")
@click.option("--frames", default=8, show_default=True, help="Per video.")
@click.option("--warm-up", default=4, show_default=True, help="Other held-out images that all methods decode first.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option(
    "--drafters",
    default="ngram,new:recycle,auto",
    show_default=True,
    help="Names or folders, optionally LABEL=SPEC; new:NAME ignores the checkpoint in the model's folder.",
)
@click.option("--nodes", default="default", show_default=True, help="Tree sizes, in addition to the adaptive one.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--prompts", type=FILE, help="A file as for mmspec tune, instead of captions; its first prompts warm up.")
def main(model: str, dtype: str, drafters: str, nodes: str, prompts: Path | None, **options: Any) -> dict[str, Any]:
    """Measure decoding speed on held-out captions: two tables, then one JSON line."""
    if prompts is None:
        warm_up = warm_up_requests(options["warm_up"], visual=True)
        requests = held_out_requests(options["images"], options["videos"], options["frames"])
        several = TASKS["scenes-images"].samples(None, options["several"])
        requests += [sample.conversation.request([]) for sample in several]
    else:
        every = read_requests(prompts)
        warm_up, requests = every[: options["warm_up"]], every[options["warm_up"] :]
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    loaded = parse_drafters(drafters, pipe.model.config.name_or_path)
    methods = [Method(TRANSFORMERS), Method(PLAIN), *drafter_methods(loaded, nodes, pipe.target)]
    rounds, max_new_tokens = options["rounds"], options["max_new_tokens"]
    warm_up_methods(pipe, warm_up, methods, max_new_tokens)
    compare_methods(pipe, requests, methods, rounds, max_new_tokens)
    rows = print_speed_tables(methods, wide_console())
    about = {**describe(pipe.target), "parameters": pipe.model.num_parameters(), "rounds": rounds}
    return {**about, "methods": rows}
