"""What the commands of measurements share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import transformers
from rich.console import Console

from mmspec.errors import UserError

WIDTH = 120


class Measurement(click.Command):
    """A command that tells a user's mistake in one line and exits with status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        transformers.logging.disable_progress_bar()  # of loading weights
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _Mistake(str(error)) from error


class _Mistake(click.ClickException):
    exit_code = 2


def console() -> Console:
    """For tables: wide enough for them where no terminal says how wide it is."""
    usual = Console()
    return usual if usual.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)


def print_result(content: dict[str, Any], out: Path | None = None) -> None:
    """Print one JSON line, and write it to ``out``, whole or not at all."""
    line = json.dumps(content)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(out.name + ".part")
        part.write_text(line + "\n")
        os.replace(part, out)
    click.echo(line)
