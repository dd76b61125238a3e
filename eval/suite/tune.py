"""The command ``mmspec tune``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import FILE, derived, json_option, model_options, trust_option
from mmspec.errors import UserError
from mmspec.eval.suite.settings import SIZES
from mmspec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from mmspec.eval.suite.race import Contender
    from mmspec.pipeline import Pipeline


@click.command(cls=Command)
@click.argument("argument", metavar="[MODEL]", required=False)
@model_options
@click.option(
    "--prompts",
    type=FILE,
    required=True,
    help="Your own: text with a prompt per line, or JSON Lines with prompt, images, videos.",
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True, help="Time limit.")
@click.option(
    "--drafters", default="auto", show_default=True, help="Names or folders, separated by commas; auto: all that fit."
)
@click.option("--sizes", type=SIZES, default="2,4,8", show_default=True, help="Draft tokens per step, or adaptive.")
@derived(SamplingParams, "max_new_tokens", default=128)
@derived(SamplingParams, "temperature", default=0.0)
@trust_option
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
    from mmspec.eval.suite.race import read_requests, tied

    model, end = argument or model, clock() + 60 * minutes
    requests = read_requests(prompts)
    decoding = DecodingOptions(options.pop("max_new_tokens"), options.pop("temperature"))
    notes = Console(stderr=True)
    pipe = open_pipeline(notes, model, None, **options)
    methods, unfit = _methods(pipe, drafters, sizes)
    for line in unfit:
        notes.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    contenders = _race(notes, pipe, requests, methods, decoding, max(end - clock(), 1e-6))
    best, why = contenders[0].to_dict(), tied(contenders)
    chosen = _options(model, contenders[0])
    if as_json:
        rows = [contender.to_dict() for contender in contenders]
        content = {"model": model, "best": None if why else best, "no_winner": why}
        click.echo(json.dumps({**content, "options": chosen, "methods": rows}))
        return
    _print_table(contenders)
    interval = "" if contenders[0].doubt else " (95 % interval {low:.2f} to {high:.2f})"
    measured = ("{method}: {median:.2f}x plain decoding" + interval).format_map(best)
    fastest = f"fastest: {measured}" if contenders[0].speed > 1 else f"fastest: plain decoding; {measured}"
    click.echo(f"no winner: {why}; {measured}" if why else fastest)
    click.echo(f"mmspec {'caption FILE' if pipe.processor.reads_media else 'generate PROMPT'} {chosen}")


def _methods(pipe: Pipeline, drafters: str, sizes: Sequence[int]) -> tuple[list[Any], list[str]]:
    """Methods of the drafters that fit the model, and a line about each that does not."""
    from mmspec.drafters.registry import drafters_for, make_drafter, split
    from mmspec.eval.harness.timing import Method

    home = pipe.model.config.name_or_path or ""
    listed = [part.strip() for part in split(drafters, ",") if part.strip()]
    names = list(
        dict.fromkeys(name for part in listed for name in (drafters_for(Path(home)) if part == "auto" else [part]))
    )
    fit, unfit = list[Method](), []
    for name in names:
        try:
            drafter = make_drafter(name, home)
            if drafter is None:
                continue
            drafter.attach(pipe.target)
            fit += [Method(f"{name}, {size} nodes", drafter.fork(pipe.target), size) for size in sizes]
            fit.append(Method(f"{name}, adaptive", drafter, None))
        except UserError as error:
            if name in listed:
                raise
            unfit.append(f"{name} does not fit: {error}")
    if not fit:
        raise UserError(f"expected a drafter, received {drafters!r}: plain decoding is always measured")
    return fit, unfit


def _race(
    notes: Any, pipe: Pipeline, requests: Sequence[dict[str, Any]], methods: Any, decoding: Any, seconds: float
) -> list[Contender]:
    from time import perf_counter as clock

    from mmspec.eval.suite.race import race
    from mmspec.progress import show_progress

    with show_progress(notes, "measuring") as show:
        start = clock()
        show(0.0, seconds, f"{len(methods)} methods")

        def show_left(left: Sequence[Contender]) -> None:
            text = f"{len(left)} left, fastest: {left[0].method.name} {left[0].speed:.2f}x"
            show(min(clock() - start, 0.99 * seconds), seconds, text)

        found = race(pipe, requests, methods, decoding, seconds, show_left)
        show(seconds, seconds)
        return found


def _print_table(contenders: Sequence[Contender]) -> None:
    from mmspec.eval.harness.output import Column, make_table, wide_console

    columns: list[Column] = [
        ("method", "{method}"),
        ("prompts", "{prompts}"),
        ("tokens per step", "{mean_acceptance_length:.2f}"),
        ("vs plain", "{median:.2f}x"),
        ("95 % interval", lambda row: "" if row["doubt"] else f"{row['low']:.2f} to {row['high']:.2f}"),
        ("equal", "{equal}/{prompts}"),
    ]
    wide_console().print(make_table(columns, [{**one.to_dict(), "doubt": one.doubt} for one in contenders]))


def _options(model: str, fastest: Contender) -> str:
    """Command-line options for the fastest method or plain decoding; the default if the result is inconclusive."""
    options = ["--model", model, "--drafter"]
    if fastest.doubt or fastest.interval[0] <= 1:
        return shlex.join([*options, "auto" if fastest.doubt else "none"])
    options.append(fastest.method.name.rpartition(", ")[0])
    if fastest.method.nodes is not None:
        options += ["--num-draft-tokens", str(fastest.method.nodes)]
    return shlex.join(options)
