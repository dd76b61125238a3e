"""``mmspec calibrate``."""

from __future__ import annotations

import json
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import json_option, model_options, trust_option


@click.command(cls=Command)
@model_options
@trust_option
@click.option("--refresh", is_flag=True, help="Measure again instead of using the cached table.")
@json_option
def calibrate(refresh: bool, as_json: bool, **options: Any) -> None:
    """Measure t(N), the time of a verify pass over N nodes, on this machine.

    Decoding chooses the tree size of each step from this table. It is measured once per model shape, device, dtype and
    software versions, and cached in $MMSPEC_CACHE or the user's cache folder.
    """
    from rich.console import Console
    from rich.table import Table

    from mmspec.cli.session import open_pipeline
    from mmspec.engine.calibrate import cost_table, describe
    from mmspec.progress import show_steps

    notes = Console(stderr=True)
    target = open_pipeline(notes, drafter=None, warm_up=0, **options).target
    with show_steps(notes):
        table = cost_table(target, refresh=refresh)
    rows = [
        {"nodes": nodes, "seconds": seconds, "ratio": seconds / table.seconds[0]}
        for nodes, seconds in zip(table.tokens, table.seconds, strict=True)
    ]
    facts = describe(target)
    if as_json:
        click.echo(json.dumps({"model": options["model"], **facts, "table": rows}))
        return
    threads = f", threads: {facts['threads']}" if facts["threads"] else ""
    out = Console(markup=False, highlight=False)
    out.print(f"{options['model']}: {facts['dtype']} on {facts['device']}{threads}", soft_wrap=True)
    shown = Table(caption="t(N): time of a verify pass over N nodes", caption_justify="left")
    for heading in ("N", "t(N) in ms", "t(N)/t(1)"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(str(row["nodes"]), f"{1e3 * row['seconds']:.2f}", f"{row['ratio']:.2f}")
    out.print(shown)
