"""The command ``mmspec export``: write a drafter in the format of other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import FOLDER, OUT_FOLDER
from mmspec.errors import UserError


@click.command(cls=Command)
@click.option(
    "--model", required=True, metavar="NAME", help="The target, a folder or hub id; its weights are not read."
)
@click.option("--drafter", type=FOLDER, required=True, help="Folder of an EAGLE-3 head or a DFlash drafter.")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder to write.")
@click.option(
    "--format",
    "layout",
    type=click.Choice(["speculators", "eagle", "z-lab"]),
    default="speculators",
    show_default=True,
    help="EAGLE-3: speculators is for vLLM, eagle for SGLang. DFlash: speculators or z-lab.",
)
@click.option(
    "--tokens", type=click.IntRange(1, 64), default=3, show_default=True, help="EAGLE-3: draft tokens per step in vLLM."
)
def export(model: str, drafter: Path, out: Path, layout: str, tokens: int) -> None:
    """Write an EAGLE-3 head or a DFlash drafter in a published format, for engines that read it."""
    from mmspec.drafters import layouts
    from mmspec.drafters.registry import drafter_spec, make_drafter, registered_name
    from mmspec.loading import load_config

    made: Any = make_drafter(str(drafter.resolve()))
    if layout not in layouts.FORMATS.get(getattr(made, "layout", None) or "", ()):
        kinds = " and ".join(drafter_spec(name).label for name, known in layouts.FORMATS.items() if layout in known)
        raise UserError(f"{drafter}: format {layout} is for {kinds}, the drafter is of kind {registered_name(made)}")
    layouts.write(made, load_config(model), out, layout, tokens)
