"""``mmspec train recycle``: fills the recycle drafter's successor table from a model's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from mmspec.cli.commands import Command
from mmspec.cli.options import FILE, FOLDER, OUT_FOLDER, model_option
from mmspec.cli.session import open_pipeline
from mmspec.drafters.recycle import Recycle
from mmspec.errors import UserError, shown
from mmspec.files import read_rows
from mmspec.progress import show_progress
from mmspec.training.features import recorded_features

_BATCH = 16


@click.command(cls=Command)
@model_option
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder to write.")
@click.option("--prompts", type=FILE, help="Answer these: JSON lines with prompt, images, videos.")
@click.option("--recorded", type=FOLDER, multiple=True, help="Or features of `make-data --record`; repeatable.")
@click.option(
    "--contexts",
    type=click.IntRange(1),
    help="With --recorded: number of contexts to keep, those that occur most often.",
)
@click.option("--max-new-tokens", default=200, show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="Of the target, as in `mmspec generate`.")
def recycle(
    model: str,
    out: Path,
    prompts: Path | None,
    recorded: tuple[Path, ...],
    contexts: int | None,
    max_new_tokens: int,
    dtype: str,
) -> None:
    """Fill a recycle drafter's table with a model's top tokens, while it answers prompts or from recorded features."""
    if (prompts is None) == (not recorded):
        received = "both" if recorded else "neither"
        raise UserError(f"expected one of --prompts and --recorded, received {received}")
    if contexts and not recorded:
        raise UserError("--contexts counts occurrences in --recorded: expected both, received no --recorded")
    drafter = Recycle()
    console = Console(stderr=True)
    pipe = open_pipeline(console, model, drafter, "auto", dtype)
    if recorded:
        with torch.inference_mode():
            sequences = recorded_features(recorded, pipe.target).sequences()
            drafter.fit(((tokens, pipe.target.head(hidden)) for tokens, hidden in sequences), contexts)
        drafter.save(out, pipe.target)
        click.echo(f"{drafter.entries} contexts: {out}", err=True)
        return
    assert prompts is not None
    requests = list(_read(prompts))
    with show_progress(console, "answering") as show:
        for start in range(0, len(requests), _BATCH):
            show(start, len(requests))
            # Without drafts, every table entry comes from a context of the output.
            part = requests[start : start + _BATCH]
            pipe.generate_batch(part, max_new_tokens=max_new_tokens, temperature=0.0, num_draft_tokens=0)
        show(len(requests), len(requests))
    drafter.save(out, pipe.target)
    click.echo(f"{len(requests)} prompts, {drafter.entries} contexts: {out}", err=True)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for number, request in read_rows(path):
        if "prompt" not in request:
            raise UserError(f"{path}, line {number}: expected an object with a prompt, received {shown(request)}")
        yield request
