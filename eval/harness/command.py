"""What the commands of measurements share."""

from __future__ import annotations

import json
import os
import subprocess
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


def whole_numbers(value: str, option: str) -> list[int]:
    """What a list option holds, in order.

    Raises:
        UserError: anything but whole numbers above 0, separated by commas.
    """
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--{option} must be whole numbers above 0, separated by commas: got {value!r}")
    return list(map(int, parts))


def commit() -> str:
    """The commit of the checkout; empty where there is none."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True)
    return done.stdout.decode().strip()


def print_result(content: dict[str, Any], out: Path | None = None) -> None:
    """Print one JSON line, and write it to ``out``."""
    if out is not None:
        write_result(content, out)
    click.echo(json.dumps(content))


def write_result(content: dict[str, Any], out: Path) -> None:
    """Write a result, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps(content) + "\n")
    os.replace(part, out)
