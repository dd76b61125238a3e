"""Training curves: ``python -m mmspec.cli.curves RUN/log.jsonl OTHER/log.jsonl --out curves.svg``."""

from __future__ import annotations

from pathlib import Path

import click

from mmspec.cli.module import ModuleCommand
from mmspec.cli.options import FILE, OUT_FILE
from mmspec.training.curve import draw


@click.command(cls=ModuleCommand)
@click.argument("logs", nargs=-1, required=True, type=FILE)
@click.option("--out", required=True, type=OUT_FILE, help="Plot to write, SVG or PNG.")
@click.option("--name", "names", multiple=True, help="Legend names of the logs; by default their folders' names.")
@click.option(
    "--against", type=click.Choice(["step", "minutes"]), default="step", show_default=True, help="Horizontal axis."
)
def main(logs: tuple[Path, ...], out: Path, names: tuple[str, ...], against: str) -> None:
    """Plot loss and acceptance length of one or several runs."""
    draw(logs, out, names, against)


if __name__ == "__main__":
    main()
