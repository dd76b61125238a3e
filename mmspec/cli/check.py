"""``mmspec check``."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from hashlib import sha256
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import (
    API_KEY,
    FILE,
    OUT_FILE,
    LoadOptions,
    adapter_option,
    data_uri,
    derived,
    device_map_option,
    drafter_option,
    json_option,
    mmproj_option,
    model_options,
)
from mmspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmspec.checking.trial import Trial


@click.command(cls=Command)
@click.argument("argument", metavar="[MODEL]", required=False)
@model_options
@mmproj_option
@device_map_option
@derived(LoadOptions, "trust_remote_code")
@drafter_option
@adapter_option
@click.option("--url", metavar="URL", help="Check this speculating server with OpenAI's API instead of MODEL.")
@click.option("--against", metavar="URL", help="Reference server without speculation, for --url.")
@API_KEY.declared
@click.option("--media", type=FILE, multiple=True, help="Your image, in addition to drawn images; repeatable.")
@click.option("--tie", type=click.FloatRange(0), help="Maximum logit margin of a tie; by default set by the dtype.")
@click.option("--only", metavar="CASES", help="Comma-separated names of cases to run, even if done before.")
@click.option("--list", "listing", is_flag=True, help="List the cases.")
@click.option("--out", type=OUT_FILE, help="Write the JSON object here after each case; a later run resumes from it.")
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    argument: str | None,
    model: str,
    url: str | None,
    against: str | None,
    api_key: str | None,
    media: tuple[Path, ...],
    tie: float | None,
    only: str | None,
    listing: bool,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Check on this machine that speculative decoding does not change answers of MODEL (or --model).

    Decodes a set of requests with the drafter, without drafts, and with transformers' generate. Exit status 1 if an
    answer differs by more than rounding. With --url and --against, two servers of one model answer the requests.
    """
    from mmspec.checking.cases import CASES, FAILING, chosen, run_cases, summary

    if listing:
        for case in CASES.values():
            click.echo(f"{case.name:14} {case.proves}")
        return 0
    if (url is None) != (against is None):
        raise UserError(f"--url and --against go together: got --{'url' if against is None else 'against'} alone")
    names = chosen(only)
    from rich.console import Console

    from mmspec.files import alone, check_settings, read_json, write_text
    from mmspec.progress import show_progress

    notes = Console(stderr=True)
    given = argument or (model if ctx.get_parameter_source("model") is not click.core.ParameterSource.DEFAULT else None)
    for file in media:
        if not (guess_type(file)[0] or "").startswith("image/"):
            raise UserError(f"--media: expected images, received {file}")
    images = [data_uri(file) for file in media]
    if url is None or against is None:
        head, trial = _local(notes, given or model, tie, images, options)
    else:
        head, trial = _remote(url, against, given, api_key, tie, images)
    shown = [sha256(image.encode()).hexdigest()[:16] for image in images]
    head["versions"] |= {"tie": tie, "media": shown, "adapters": dict(options["adapters"])}
    locked = nullcontext() if out is None else alone(out.with_name(f".{out.name}.lock"), out)
    with closing(trial), locked:
        done = {}
        if out is not None and out.exists():
            saved = read_json(out)
            check_settings(out, {name: saved.get(name) for name in head}, head)
            again = {*(names if only else ()), *(one["name"] for one in saved["cases"] if one["outcome"] == "failed")}
            done = {one["name"]: one for one in saved["cases"] if one["name"] not in again}
        with show_progress(notes, "checking") as show:
            for cases in run_cases(names, trial, done, show):
                report = {**head, "cases": cases}
                if out is not None:
                    write_text(out, json.dumps(report, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print_table(report["cases"])
        click.echo(summary(report["cases"]))
    return int(any(case["outcome"] in FAILING for case in report["cases"]))


def _local(
    notes: Any, model: str, tie: float | None, images: Sequence[str], options: dict[str, Any]
) -> tuple[dict[str, Any], Trial]:
    """Report header and trial of a model in this process."""
    import platform
    from importlib.metadata import version

    from mmspec import __version__
    from mmspec.checking.sides import GenerateSide, LocalSide
    from mmspec.checking.trial import BOUNDS, SIZE, Trial
    from mmspec.cli.session import open_pipeline
    from mmspec.drafters.registry import registered_name
    from mmspec.pipeline import Pipeline

    options["adapters"] = dict(options["adapters"])
    pipe = open_pipeline(notes, model, warm_up=0, **options)
    dtype = str(pipe.target.dtype).removeprefix("torch.")
    packages = {name: version(name) for name in ("torch", "transformers")}
    versions = {"mmspec": __version__, "python": platform.python_version(), **packages}
    versions |= {"device": str(pipe.target.device), "dtype": options["dtype"], "activations": dtype}
    plain = Pipeline(pipe.target, pipe.processor, name=pipe.name)
    bound = BOUNDS.get(dtype, BOUNDS["float32"]) if tie is None else tie
    trial = Trial(LocalSide(pipe, size=SIZE), [LocalSide(plain), GenerateSide(plain)], bound, images)
    return {"model": model, "drafter": registered_name(pipe.drafter), "versions": versions}, trial


def _remote(
    url: str, against: str, model: str | None, key: str | None, tie: float | None, images: Sequence[str]
) -> tuple[dict[str, Any], Trial]:
    """Report header and trial of two servers."""
    from mmspec import __version__
    from mmspec.checking.sides import ServerSide
    from mmspec.checking.trial import BOUNDS, Trial

    tested = ServerSide("the tested server", url, model, key)
    plain = ServerSide("the other server", against, model, key, scored=True)
    versions = {"mmspec": __version__, "url": tested.version, "against": plain.version}
    trial = Trial(tested, [plain], BOUNDS["bfloat16"] if tie is None else tie, images=images)
    return {"model": tested.model, "drafter": None, "versions": versions}, trial


def _print_table(cases: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    out = Console(markup=False, highlight=False)
    numbers = [Column(heading, justify="right") for heading in ("tokens", "accepted", "seconds", "power")]
    table = Table(*(Column(heading, no_wrap=True) for heading in ("case", "outcome")), *numbers)
    for case in cases:
        known = case["accepted"] is not None or case["rehearsed"]
        accepted = str((case["accepted"] or 0) + case["rehearsed"]) if known else "?"
        power = "\n".join(f"{deviation}: {share:.0%}" for deviation, share in case.get("power", {}).items())
        table.add_row(case["name"], case["outcome"], str(case["tokens"]), accepted, f"{case['seconds']:.1f}", power)
    out.print(table)
    for case in cases:
        for line in [*filter(None, [case["reason"]]), *map(_difference_line, case["differences"]), *case["notes"]]:
            out.print(f"{case['name']}: {line}", soft_wrap=True)


def _difference_line(difference: dict[str, Any]) -> str:
    margin, place = difference["margin"], difference["position"]
    where = "" if place is None else f" at token {place}"
    logits = "" if margin is None else f", logit margin {margin:.3g}"
    about = "{found!r} against {expected!r}" if difference["expected"] else "{found}"
    return f"{{question!r}} differs from {{against}}{where}{logits}: {about}".format_map(difference)
