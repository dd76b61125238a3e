"""The command ``mmspec export``: write a drafter in the format of other engines."""

from __future__ import annotations

from pathlib import Path

import click

from mmspec.cli.options import FOLDER, OUT_FOLDER
from mmspec.errors import UserError


@click.command()
@click.option(
    "--model", required=True, metavar="NAME", help="The target, a folder or hub id; its weights are not read."
)
@click.option("--drafter", type=FOLDER, required=True, help="Folder of an EAGLE-3 head.")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder to write.")
@click.option(
    "--format",
    "layout",
    type=click.Choice(["speculators", "eagle"]),
    default="speculators",
    show_default=True,
    help="speculators is for vLLM, eagle for SGLang.",
)
@click.option(
    "--tokens", type=click.IntRange(1, 64), default=3, show_default=True, help="Draft tokens per step in vLLM."
)
def export(model: str, drafter: Path, out: Path, layout: str, tokens: int) -> None:
    """Write an EAGLE-3 head so that vLLM or SGLang can serve it, and any engine that reads these formats."""
    from mmspec.drafters.eagle3.drafter import Eagle3
    from mmspec.drafters.eagle3.export import export as write
    from mmspec.drafters.registry import make_drafter, registered_name
    from mmspec.loading import load_config

    head = make_drafter(str(drafter.resolve()))
    if not isinstance(head, Eagle3):
        raise UserError(
            f"{drafter}: format {layout} is for EAGLE-3 heads, the drafter is of kind {registered_name(head)}"
        )
    write(head, load_config(model), out, layout, tokens)
