"""The command ``mmspec eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import FOLDER, OUT_FOLDER, derived, model_options
from mmspec.errors import UserError
from mmspec.eval.suite.settings import SuiteSettings, llama_server_option
from mmspec.files import alone
from mmspec.jobs import ENGINES


@click.command(name="eval", cls=Command)
@model_options
@click.option("--tasks", default="embedded", show_default=True, help="Names and groups, separated by commas.")
@click.option("--list", "listing", is_flag=True, help="List the tasks and the fields of their data.")
@click.option("--data", type=FOLDER, help="Folder of local benchmark files.")
@derived(SuiteSettings)
@llama_server_option
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Model-holding actors on Ray.")
@click.option("--out", type=OUT_FOLDER, help="Folder of the run; required unless --list is given.")
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

    Writes to --out: records.jsonl (all measurements), answers/ (Spec-Bench's format), summary.json and report.md. The
    same command resumes a run that was stopped.
    """
    if listing:
        from mmspec.eval.suite.tasks import TASKS

        for task in TASKS.values():
            click.echo(f"{task.name:18} {task.description}")
        return
    if out is None:
        raise UserError("expected --out FOLDER for the results, received none")

    from mmspec.eval.suite.run import is_visual, run_suite
    from mmspec.eval.suite.tasks import select_tasks

    selected = tuple(task.name for task in select_tasks(tasks, is_visual(options["model"])))
    settings = SuiteSettings(tasks=selected, data=None if data is None else str(data.resolve()), **options)
    with alone(out / ".lock", out):
        summary = run_suite(settings, out, engine, workers)
    if as_json:
        click.echo(json.dumps(summary))
        return
    from mmspec.eval.harness.output import wide_console
    from mmspec.eval.suite.report import brief_tables, legend, refusals

    console = wide_console()
    for table in brief_tables(summary["rows"], console.width):
        console.print(table)
    for line in [*legend(summary["rows"]), *refusals(summary)]:
        click.echo(line)
    click.echo(out / "report.md", err=True)
