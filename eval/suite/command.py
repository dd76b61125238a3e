"""``mmspec eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mmspec.cli.options import OUT_FOLDER, Number, model_options
from mmspec.errors import UserError
from mmspec.jobs import ENGINES


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(Number(0).convert(part, param, ctx) for part in value.split(",")))


def _sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    return tuple(
        dict.fromkeys(
            int(click.IntRange(1).convert(part, param, ctx))  # type: ignore[arg-type]
            for part in value.split(",")
        )
    )


@click.command(name="eval")
@model_options
@click.option("--tasks", default="embedded", show_default=True, help="Names and groups, separated by commas.")
@click.option("--list", "listing", is_flag=True, help="List tasks with the fields of their data, and exit.")
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of benchmarks in local files."
)
@click.option(
    "--methods",
    default="auto",
    show_default=True,
    help="generate, lookup, assisted:FOLDER, none, or DRAFTER[@tree|@chain[N]|@NODES], LABEL=... each if wished.",
)
@click.option("--limit", type=click.IntRange(1), help="Samples per task; by default all, or 64 drawn ones.")
@click.option("--frames", type=click.IntRange(1, 512), default=8, show_default=True, help="Per drawn video.")
@click.option("--temperatures", default="0", show_default=True, callback=_numbers, help="0 is greedy.")
@click.option("--batch-sizes", default="1", show_default=True, callback=_sizes, help="Conversations at once.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--warm-up", type=click.IntRange(0), default=2, show_default=True, help="Batches that are not counted.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Per answer; by default what each task needs.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="CPU threads; torch's choice by default.")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Model-holding actors on Ray.")
@click.option("--out", type=OUT_FOLDER, help="Folder of the run; needed to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object instead of tables.")
def evaluate(
    listing: bool,
    tasks: str,
    data: Path | None,
    engine: str,
    workers: int,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure speed, losslessness and quality of methods side by side.

    The folder --out gets records.jsonl (everything), answers/ (Spec-Bench's format), summary.json and report.md. Called
    again, a run that was stopped goes on where it was.
    """
    if listing:
        from eval.suite.tasks import TASKS

        for task in TASKS.values():
            click.echo(f"{task.name:18} {task.about}")
        return
    if out is None:
        raise UserError("expected --out FOLDER for the results, received none")

    from eval.suite.evaluator import Settings
    from eval.suite.run import run, sees
    from eval.suite.tasks import pick

    picked = tuple(task.name for task in pick(tasks, sees(options["model"])))
    settings = Settings(tasks=picked, data=None if data is None else str(data.resolve()), **options)
    summary = run(settings, out, engine, workers)
    if as_json:
        click.echo(json.dumps(summary))
        return
    from rich.table import Table

    from eval.harness.command import console
    from eval.suite.report import COLUMNS, by_cell, cells

    wide = console()
    for title, rows in by_cell(summary["rows"]):
        score = next(iter(rows[0].get("score", {})), COLUMNS[-1])
        table = Table(*COLUMNS[:-1], score, title=title)
        table.columns[0].no_wrap, table.columns[0].overflow = True, "fold"
        for row in rows:
            table.add_row(*cells(row, brief=True))
        wide.print(table)
    click.echo(out / "report.md", err=True)
