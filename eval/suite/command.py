"""The commands ``mmspec eval`` and ``mmspec tune``, without torch until they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import FILE, FOLDER, OUT_FOLDER, LoadOptions, derived, json_option, model_options
from mmspec.errors import UserError
from mmspec.eval.suite import MEASURED, SIZES, SuiteSettings, peer_option
from mmspec.files import alone
from mmspec.jobs import ENGINES
from mmspec.sampling.params import SamplingParams


@click.command(name="eval", cls=Command)
@model_options
@click.option("--tasks", default="embedded", show_default=True, help="Names and groups, separated by commas.")
@click.option("--list", "listing", is_flag=True, help="List the tasks and the fields of their data.")
@click.option("--data", type=FOLDER, help="Folder of local benchmark files.")
@derived(SuiteSettings)
@peer_option
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Model-holding actors on Ray.")
@click.option("--out", type=OUT_FOLDER, help="Folder of the run; required unless --list is given.")
@click.option("--published", is_flag=True, help="Show results of papers, on others' hardware, next to the run.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object instead of tables.")
def evaluate(
    listing: bool,
    tasks: str,
    data: Path | None,
    engine: str,
    workers: int,
    out: Path | None,
    published: bool,
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

    from mmspec.eval.suite.report import print_summary, write_report
    from mmspec.eval.suite.run import run_suite
    from mmspec.eval.suite.tasks import select_tasks
    from mmspec.loading import load_config
    from mmspec.plugins import target_class

    visual = target_class(load_config(options["model"])).processor_class.reads_media
    selected = tuple(task.name for task in select_tasks(tasks, visual))
    settings = SuiteSettings(tasks=selected, data=None if data is None else str(data.resolve()), **options)
    with alone(out / ".lock", out):
        summary = run_suite(settings, out, engine, workers)
        if published:
            write_report(summary, out, published)
    if as_json:
        click.echo(json.dumps(summary))
        return
    print_summary(summary, published)
    click.echo(out / "report.md", err=True)


@click.command(cls=Command)
@click.argument("argument", metavar="[MODEL]", required=False)
@model_options
@click.option(
    "--prompts",
    type=FILE,
    required=True,
    help="Your own: text with a prompt per line, or JSON Lines with prompt, images, videos; at least "
    f"{MEASURED + 1}, the first is the warm-up.",
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True, help="Time limit.")
@click.option(
    "--drafters", default="auto", show_default=True, help="Names or folders, separated by commas; auto: all that fit."
)
@click.option("--sizes", type=SIZES, default="2,4,8", show_default=True, help="Draft tokens per step, or adaptive.")
@derived(SamplingParams, "max_new_tokens", default=128)
@derived(SamplingParams, "temperature", default=0.0)
@derived(LoadOptions, "trust_remote_code")
@json_option
def tune(
    argument: str | None,
    model: str,
    prompts: Path,
    minutes: float,
    drafters: str,
    sizes: Sequence[int],
    as_json: bool,
    **options: Any,
) -> None:
    """Find the fastest drafter for MODEL (or --model) and your prompts on this machine.

    Drafters and tree sizes decode the same prompts, interleaved with plain decoding; slow methods drop out. Prints the
    fastest with its 95 % interval, and the options to use it; or "no winner" if intervals overlap.
    """
    from time import perf_counter as clock

    from rich.console import Console

    from mmspec.cli.session import open_pipeline
    from mmspec.eval.harness.timing import DecodingOptions
    from mmspec.eval.suite import race
    from mmspec.progress import show_progress

    model, start = argument or model, clock()
    requests = race.read_requests(prompts)
    decoding = DecodingOptions(options.pop("max_new_tokens"), options.pop("temperature"))
    notes = Console(stderr=True)
    pipe = open_pipeline(notes, model, None, **options)
    methods, unfit = race.fitting_methods(pipe, drafters, sizes)
    for line in unfit:
        notes.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    if len(requests) <= MEASURED:
        few = f"note: a 95 % interval takes {MEASURED + 1} prompts, the first is the warm-up: got {len(requests)}"
        notes.print(few, markup=False, highlight=False, soft_wrap=True)
    seconds = max(start + 60 * minutes - clock(), 1e-6)
    with show_progress(notes, "measuring") as show:
        contenders = race.race(pipe, requests, methods, decoding, seconds, show)
    best, why = contenders[0].to_dict(), race.tied(contenders)
    chosen = race.options_of(model, contenders[0])
    if as_json:
        rows = [contender.to_dict() for contender in contenders]
        content = {"model": model, "best": None if why else best, "no_winner": why}
        click.echo(json.dumps({**content, "options": chosen, "methods": rows}))
        return
    race.print_table(contenders)
    interval = "" if contenders[0].doubt else " (95 % interval {low:.2f} to {high:.2f})"
    measured = ("{method}: {median:.2f}x plain decoding" + interval).format_map(best)
    fastest = f"fastest: {measured}" if contenders[0].speed > 1 else f"fastest: plain decoding; {measured}"
    click.echo(f"no winner: {why}; {measured}" if why else fastest)
    click.echo(f"mmspec {'caption FILE' if pipe.processor.reads_media else 'generate PROMPT'} {chosen}")
