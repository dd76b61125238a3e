"""The command ``mmspec export``: write a drafter in the format of other engines."""

from __future__ import annotations

from pathlib import Path

import click

from mmspec.cli.help import Command
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
    from mmspec.drafters.dflash.drafter import DFlash
    from mmspec.drafters.eagle3.drafter import Eagle3
    from mmspec.drafters.exported import export_blocks, export_head
    from mmspec.drafters.registry import make_drafter, registered_name
    from mmspec.loading import load_config

    made = make_drafter(str(drafter.resolve()))
    if isinstance(made, Eagle3) and layout != "z-lab":
        export_head(made, load_config(model), out, layout, tokens)
    elif isinstance(made, DFlash) and layout != "eagle":
        export_blocks(made, load_config(model), out, layout)
    else:
        kinds = {"eagle": "EAGLE-3 heads", "z-lab": "DFlash drafters"}.get(layout, "EAGLE-3 heads and DFlash drafters")
        raise UserError(f"{drafter}: format {layout} is for {kinds}, the drafter is of kind {registered_name(made)}")
