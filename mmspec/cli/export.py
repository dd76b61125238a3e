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
@click.option("--drafter", type=FOLDER, required=True, help="Folder of the drafter.")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder to write.")
@click.option(
    "--format",
    "layout",
    type=click.Choice(["speculators", "eagle", "z-lab", "vllm", "medusa"]),
    help="EAGLE-3: speculators (default) is for vLLM, eagle for SGLang. EAGLE: eagle. DFlash: speculators (default) or "
    "z-lab. Medusa: vllm (default), or medusa for the authors' code.",
)
@click.option(
    "--tokens", type=click.IntRange(1, 64), default=3, show_default=True, help="EAGLE-3: draft tokens per step in vLLM."
)
def export(model: str, drafter: Path, out: Path, layout: str | None, tokens: int) -> None:
    """Write a drafter in a published format, for engines that read it."""
    from mmspec.drafters import layouts
    from mmspec.drafters.registry import drafter_spec, make_drafter, registered_name
    from mmspec.loading import load_config

    made: Any = make_drafter(str(drafter.resolve()))
    kind = registered_name(made)
    formats = layouts.FORMATS.get(kind or "", {})
    layout = layout or ("speculators" if "speculators" in formats else next(iter(formats), ""))
    if layout not in formats:
        known = [name for name, some in layouts.FORMATS.items() if layout in some or not layout]
        kinds, what = " and ".join(drafter_spec(name).label for name in known), f"format {layout} is"
        raise UserError(
            f"{drafter}: {what if layout else 'there are formats'} for {kinds}, the drafter is of kind {kind}"
        )
    layouts.write(made, load_config(model), out, layout, tokens)
