"""``mmspec clean``."""

from __future__ import annotations

import json
import shutil
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import json_option


@click.command(cls=Command)
@json_option
def clean(as_json: bool) -> None:
    """Remove unused files of earlier versions from the cache.

    Earlier versions converted GGUF files to folders of several times their size. `mmspec info` lists these folders.
    """
    from mmspec.files import superseded

    found: list[dict[str, Any]] = [{"folder": str(folder), "bytes": size} for folder, size in superseded().items()]
    for one in found:
        shutil.rmtree(one["folder"], ignore_errors=True)
    left = superseded().keys()
    removed = [one for one in found if one["folder"] not in map(str, left)]
    if as_json:
        click.echo(json.dumps({"removed": removed}))
        return
    for one in removed:
        click.echo(f"removed {one['folder']}: {one['bytes'] / 1e6:,.0f} MB")
    click.echo(f"freed {sum(one['bytes'] for one in removed) / 1e6:,.0f} MB")
    for folder in left:
        click.echo(f"could not remove {folder}", err=True)
