"""Command class, tables and JSON results of the benchmarks."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from rich.table import Table

from mmspec import __version__
from mmspec.cli.app import sigterm_exits
from mmspec.cli.commands import ModuleCommand
from mmspec.cli.options import OUT_FILE
from mmspec.engine.threads import fix_threads, restored_threads
from mmspec.files import write_text
from mmspec.ops.cpu_library import build
from mmspec.targets.packing import weights_kind
from mmspec.targets.transformers_target import TransformersTarget

WIDTH = 120
Cell = str | Callable[[Mapping[str, Any]], str]  # a format string over a row's fields, or a function of the row
Column = tuple[str, Cell]  # header and cell of a table's column


class BenchmarkCommand(ModuleCommand):
    """The command of a benchmark: without progress bars of loading weights; SIGTERM ends its child processes, too."""

    def invoke(self, ctx: click.Context) -> Any:
        transformers.logging.disable_progress_bar()
        with sigterm_exits():
            return super().invoke(ctx)


def benchmark(function: Callable[..., dict[str, Any]]) -> click.Command:
    """The command of a function that prints tables and returns a JSON result. It adds the options ``--out`` and, if the
    function has none of its own, ``--threads``. Where the result's ``failed`` is true, the exit status is 1."""

    @wraps(function)
    def run(out: Path | None, **options: Any) -> None:
        with restored_threads():
            if not own_threads and (threads := options.pop("threads")):
                fix_threads(threads)
            result = function(**options)
        print_result(result, out)
        if result.get("failed"):
            raise SystemExit(1)

    command = click.command(cls=BenchmarkCommand)(run)
    own_threads = any(option.name == "threads" for option in command.params)
    if not own_threads:
        help_text = "CPU threads; torch's default if not given."
        command.params.append(click.Option(["--threads"], type=click.IntRange(1), help=help_text))
    command.params.append(click.Option(["--out"], type=OUT_FILE, help="Also write the JSON result to this file."))
    return command


def wide_console() -> Console:
    """A console for tables, 120 columns wide where neither a terminal nor ``COLUMNS`` sets the width."""
    default = Console()
    return default if default.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)


def cell_text(cell: Cell, row: Mapping[str, Any]) -> str:
    """A cell of a row; empty if its format string names a field that is missing or None."""
    if not isinstance(cell, str):
        return cell(row)
    try:
        return cell.format_map({name: value for name, value in row.items() if value is not None})
    except (KeyError, TypeError):  # a missing field, or None within one
        return ""


def make_table(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, sections: Sequence[str] = (), **options: Any
) -> Table:
    """A table with one line per row, and a rule where one of the fields ``sections`` changes. ``options`` are those of
    ``rich.table.Table``, e.g. ``title`` and ``caption``."""

    table = Table(*(header for header, _ in columns), **options)
    for row, following in zip(rows, [*rows[1:], None], strict=False):
        end = following is not None and any(row[name] != following[name] for name in sections)
        table.add_row(*(cell_text(cell, row) for _, cell in columns), end_section=end)
    return table


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def milliseconds(field: str, digits: int = 2) -> Callable[[Mapping[str, Any]], str]:
    """Cell of a field in seconds, shown in milliseconds."""
    return lambda row: f"{1000 * row[field]:.{digits}f}"


def mebibytes(field: str) -> Callable[[Mapping[str, Any]], str]:
    """Cell of a field in bytes, shown in MiB; empty if it is None."""
    return lambda row: "" if row[field] is None else f"{row[field] / 2**20:.0f}"


def processor() -> str:
    """CPU model name, or its architecture if unknown."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def describe(target: TransformersTarget) -> dict[str, Any]:
    """Model shape, form of the weights, device and software versions."""
    model, device = target.model, target.device
    on_cpu = device.type == "cpu"
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    return {
        "architecture": type(model).__name__,
        **{name: getattr(target.config, name, None) for name in names},
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights_kind(model),
        "device": processor() if on_cpu else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads() if on_cpu else None,
        "build": build() if on_cpu else None,
        "mmspec": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }


def git_commit() -> str:
    """The short hash of the checkout's commit; empty outside a repository, and where git is not installed."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True)
    except OSError:
        return ""
    return done.stdout.decode().strip()


def print_result(content: dict[str, Any], out: Path | None = None) -> None:
    """Print a result as one JSON line, and write it to ``out`` if given."""
    line = json.dumps(content)
    if out is not None:
        write_text(out, line + "\n")
    click.echo(line)
