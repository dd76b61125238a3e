"""Benchmarks and studies: ``python -m mmspec.eval NAME OPTIONS``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from mmspec.cli.app import limit_spinning
from mmspec.errors import missing_import, nearest


class Studies(click.Group):
    """Modules of this package, imported only when called; ``main`` of each is its command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        known = self.list_commands(ctx)
        if name not in known:
            raise click.UsageError(
                f"unknown study: expected one of {', '.join(known)}, got {name!r}{nearest(name, known)}"
            )
        command: click.Command = import_module(f"mmspec.eval.{name}").main
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise click.UsageError(str(missing_import(error))) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Studies"):
            formatter.write_text(", ".join(self.list_commands(ctx)))


main = Studies("python -m mmspec.eval", help="Run a benchmark or study; NAME --help shows its options.")

if __name__ == "__main__":
    limit_spinning()
    main()
