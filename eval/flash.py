"""Ablation of FLASH's settings: ``python -m mmspec.eval flash --out FOLDER --train "--data FILE"``.

One drafter is trained per combination of tokens per pass, latents per image and glancing. Each learns to draft the same
number of levels, in as many self-fed passes as that takes. One token per pass with all visual tokens is MSD, the
baseline. Trained drafters are kept in the folder, and a stopped run resumes there. Then all are measured, interleaved,
on the same held-out requests: images, images with a sign of random letters, several images at once, videos of a few and
of many frames.

Acceptance and the cost of a tree are those of trees of one fixed size. Speed and drafting cost per token are those of
the adaptive tree, the drafter's prefill included. Ratios to MSD are by request, then their median.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

import mmspec
from mmspec.cli.options import OUT_FILE, OUT_FOLDER, Number
from mmspec.engine.calibrate import cost_table, describe
from mmspec.errors import UserError
from mmspec.eval.decoding.flash_ablation import (
    FIRST_INDEX,
    LEVELS,
    Variant,
    ablation_requests,
    average_over_suites,
    average_table,
    compare_variants,
    load_variant,
    suite_table,
    train_variant,
    variant_grid,
)
from mmspec.eval.harness.options import SIZES, CommaList
from mmspec.eval.harness.output import BenchmarkCommand, print_result, wide_console


class _Latents(click.IntRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return 0 if value == "all" else super().convert(value, param, ctx)


@click.command(cls=BenchmarkCommand)
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder of the trained drafters.")
@click.option("--train", "training", default="", help='Options of `mmspec train flash`, e.g. "--data FILE".')
@click.option("--minutes", type=float, help="Training time of each drafter.")
@click.option("--steps", type=click.IntRange(1), help="Or its training steps.")
@click.option("--levels", default=LEVELS, show_default=True, help="Tree depth that drafters are trained for.")
@click.option("--slots", default="1,2,3,5,12", show_default=True, type=SIZES, help="Tokens per pass.")
@click.option("--latents", default="4,16,all", show_default=True, type=CommaList(_Latents(0)), help="Per image.")
@click.option(
    "--glancing",
    default="0,0.4",
    show_default=True,
    type=CommaList(Number(0)),
    help="Shares of glancing; the first is the default one.",
)
@click.option("--images", default=12, show_default=True, help="Requests of each suite of images.")
@click.option("--videos", default=8, show_default=True, help="Requests of each suite of videos.")
@click.option("--frames", default="4,8,16", show_default=True, type=SIZES, help="Per video.")
@click.option("--nodes", default=24, show_default=True, help="Draft tokens of a tree of fixed size.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-new-tokens", default=120, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads.")
@click.option("--result", type=OUT_FILE, help="Also write the JSON result to this file.")
def main(model: str, out: Path, training: str, minutes: float | None, steps: int | None, **options: Any) -> None:
    """Train the drafters that are not trained yet, measure all, print tables and one JSON line."""
    if (minutes is None) == (steps is None):
        raise UserError(f"give minutes or steps: received {minutes} and {steps}")
    length = ["--minutes", f"{minutes:g}"] if steps is None else ["--steps", str(steps)]
    extra = ["--model", model, "--threads", str(options["threads"]), *shlex.split(training)]
    variants = variant_grid(options["slots"], options["latents"], options["glancing"], options["levels"])
    for number, variant in enumerate(variants, start=1):
        click.echo(f"{number}/{len(variants)} {variant.name}", err=True)
        train_variant(variant, out, length, extra, options["levels"])
    figures = _measure(model, out, variants, options)
    about = {"length": length, "training": training, "levels": options["levels"]}
    print_result({"model": model, **about, **figures}, options["result"])


def _measure(model: str, out: Path, variants: Sequence[Variant], options: dict[str, Any]) -> dict[str, Any]:
    """Measure the trained drafters on all suites and print the tables; returns the figures."""
    torch.set_num_threads(options["threads"])
    pipe = mmspec.load(model, drafter=None)
    cost = cost_table(pipe.target, refresh=True)
    drafters = {variant: load_variant(variant, out) for variant in variants}
    for drafter in drafters.values():
        drafter.attach(pipe.target)
    settings = {name: options[name] for name in ("nodes", "rounds", "max_new_tokens")}
    counts = {name: options[name] for name in ("images", "videos")}
    by_suite = {
        suite: compare_variants(pipe, drafters, requests, **settings)
        for suite, requests in ablation_requests(**counts, frames=options["frames"]).items()
    }
    rows = [{"suite": suite, **row} for suite, suite_rows in by_suite.items() for row in suite_rows]
    averages = average_over_suites(by_suite)
    wide_console().print(suite_table(rows))
    wide_console().print(average_table(averages))
    about = {**describe(pipe.target), "calibrated_pass_seconds": cost(1), "first_scene": FIRST_INDEX}
    return {**about, **settings, **counts, "rows": rows, "over_suites": averages}


if __name__ == "__main__":
    main()
