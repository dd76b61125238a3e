"""How much faster than plain decoding: ``python -m eval.speed``.

For every prompt, all ways of decoding it run in turn, several rounds, on the same model in the same process; a way's
time is its median over the rounds, and its output must equal that of transformers' ``generate``. Ratios are of whole
requests (vision tower and prefill included) and of decoding alone.

Every way first decodes a few other prompts. A drafter that learns from earlier answers, and its budget, start every
round of a prompt as the earlier prompts left them, so that no prompt is ever drafted from its own answer.

Beside the speed stands where it goes: the shares of prefill, drafting, verifying and committing in a whole request, and
what one drafted tree costs in passes of the target over one token, both timed on the same prompts in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import mmspec
from eval.harness.command import Measurement, console, print_result
from eval.harness.drafters import named_drafters, tree_sizes
from eval.harness.prompts import held_out_requests
from eval.harness.timing import PARTS, PLAIN, TRANSFORMERS, Way, measure, ratios
from mmspec.calibrate import cost_table, describe
from mmspec.cli.options import OUT_FILE
from mmspec.drafter import fork


def report(ways: Sequence[Way], wide: Console) -> list[dict[str, Any]]:
    """Print the tables and return their rows. Ratios are of seconds per token by prompt, then their median and worst.

    Transformers' own way need not be among ``ways``, plain decoding must be.
    """
    named = {way.name: way for way in ways}
    theirs, plain = named.get(TRANSFORMERS), named[PLAIN]
    table = Table("way", "acceptance", "vs HF", "vs plain", "worst", "decoding", "worst", "equal")
    rows = []
    for way in ways:
        against, decoding = ratios(plain, way, "total"), ratios(plain, way, "decoding")
        row = {
            "way": way.name,
            "mean_acceptance_length": statistics.mean(way.lengths),
            "ratio_transformers": statistics.median(ratios(theirs, way, "total")) if theirs else None,
            "ratio_plain": statistics.median(against),
            "ratio_plain_worst": min(against),
            "decoding_ratio_plain": statistics.median(decoding) if decoding else None,
            "decoding_ratio_plain_worst": min(decoding, default=None),
            "equal": way.equal,
            "prompts": len(way.seconds),
        }
        figures = ["" if row[key] is None else f"{row[key]:.2f}" for key in list(row)[1:7]]
        table.add_row(way.name, *figures, f"{row['equal']}/{row['prompts']}")
        rows.append(row | (split(way, plain) if way is not theirs else {}))
    wide.print(table)
    wide.print(_split_table(rows))
    return rows


def split(way: Way, plain: Way) -> dict[str, Any]:
    """Where a way's time goes.

    Returns:
        ``shares`` of a request's whole time by part, means over the prompts; ``tree_seconds`` and ``pass_seconds``,
        what it takes to draft one tree and to verify it, medians; ``tree_passes`` and ``pass_passes``, the same over
        the time of one pass in plain decoding (over one token), by prompt, then their median.
    """
    shares = {part: statistics.mean(s[part] / s["total"] for s in way.seconds) for part in PARTS}
    shares["rest"] = 1.0 - sum(shares.values())
    costs: dict[str, float] = {}
    for name in ("tree", "pass"):
        # An adaptive way may have drafted no tree for some prompts.
        pairs = [(a, b) for a, b in zip(way.column(name), plain.column("pass"), strict=True) if a > 0.0]
        costs[f"{name}_seconds"] = statistics.median(a for a, _ in pairs) if pairs else 0.0
        costs[f"{name}_passes"] = statistics.median(a / b for a, b in pairs) if pairs else 0.0
    return {"shares": shares, **costs}


def _split_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("way", *PARTS, "rest", "ms per tree", "tree in passes", "verify in passes")
    table.title = "share of a request's time; cost of drafting and of verifying a tree in plain passes of the target"
    for row in rows:
        if "shares" in row:
            shares = [f"{100 * share:.0f} %" for share in row["shares"].values()]
            costs = (f"{1000 * row['tree_seconds']:.2f}", f"{row['tree_passes']:.2f}", f"{row['pass_passes']:.2f}")
            table.add_row(row["way"], *shares, *costs)
    return table


@click.command(cls=Measurement)
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--images", default=24, show_default=True, help="Held-out images.")
@click.option("--videos", default=8, show_default=True, help="Held-out videos of 8 frames.")
@click.option("--warm-up", default=4, show_default=True, help="Other held-out images that every way decodes first.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option(
    "--drafters",
    default="ngram,new:recycle,auto",
    show_default=True,
    help="Names or folders, LABEL=SPEC each if wished; new:NAME takes no checkpoint.",
)
@click.option("--nodes", default="default", show_default=True, help="Fixed tree sizes, beside the adaptive one.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", type=OUT_FILE, help="Write the JSON line here too.")
def main(
    model: str,
    images: int,
    videos: int,
    warm_up: int,
    rounds: int,
    max_new_tokens: int,
    drafters: str,
    nodes: str,
    dtype: str,
    out: Path | None,
) -> None:
    """Measure decoding speed on held-out captions: two tables, then one JSON line."""
    pipe = mmspec.load(model, drafter=None, dtype=dtype)
    ways = [Way(TRANSFORMERS), Way(PLAIN)]
    for name, drafter in named_drafters(drafters, pipe.model.config.name_or_path).items():
        for size in dict.fromkeys(tree_sizes(drafter, nodes).values()):
            ways.append(Way(f"{name}, {size} nodes", fork(drafter, pipe.target), size))
        ways.append(Way(f"{name}, adaptive", drafter, None))
    calibrated = cost_table(pipe.target, refresh=True)
    measure(pipe, held_out_requests(warm_up, 0, first=4000), ways, 1, max_new_tokens)
    for way in ways:
        way.clear()
    measure(pipe, held_out_requests(images, videos), ways, rounds, max_new_tokens)
    rows = report(ways, console())
    figures = {"rounds": rounds, "calibrated_pass_seconds": calibrated(1), "ways": rows}
    print_result({**describe(pipe.target), **figures}, out)


if __name__ == "__main__":
    main()
