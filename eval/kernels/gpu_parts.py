"""Runs the parts of the GPU benchmark: results are saved after every row, failures recorded, finished parts skipped."""

from __future__ import annotations

import gc
import itertools
import json
import platform
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch
import transformers
from rich.table import Table

from mmspec.errors import UserError
from mmspec.eval.harness.output import Column, git_commit, make_table, wide_console, write_result
from mmspec.ops import kernels

Rows = Iterator[dict[str, Any]]
_SAME = ("device", "torch", "transformers", "commit", "quick")
"""Facts that must agree for a run to be resumed."""


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Device, software versions and commit."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "kernels": kernels.in_use(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": git_commit(),
    }
    if device.type == "cuda":
        import triton

        properties: Any = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return facts


def finished_parts(out: Path | None, content: Mapping[str, Any], skip: Collection[str]) -> dict[str, Any]:
    """Parts of an earlier run on the same machine and commit: the finished ones, and failed ones named in ``skip``."""
    try:
        earlier = json.loads(out.read_text()) if out is not None else {}
    except (OSError, ValueError):
        return {}
    if any(earlier.get(key) != content[key] for key in _SAME):
        return {}
    return {
        name: part
        for name, part in earlier["parts"].items()
        if name in skip or ("seconds" in part and "error" not in part)
    }


def run_parts(
    parts: Mapping[str, Callable[[], Rows]],
    content: dict[str, Any],
    out: Path | None,
    device: torch.device,
    skip: Collection[str] = (),
) -> None:
    """Run all parts that ``content`` lacks, add their rows to it, and write it to ``out`` after every row.

    Raises:
        UserError: a part has left the device unusable.
    """
    console = wide_console()
    names = [name for name in parts if name not in content["parts"] and name not in skip]
    for name in names:
        start = clock()
        rows: list[dict[str, Any]] = []  # rows before a failure are kept
        part: dict[str, Any] = {"rows": rows}
        content["parts"][name] = part
        try:
            for row in parts[name]():
                rows.append(row)
                if out is not None:
                    write_result(content, out)
        except Exception as error:  # the other parts still run
            part["error"], part["where"] = _message(error), traceback.format_exc()[-2000:]
        if failed := [row["error"] for row in rows if "error" in row]:
            part.setdefault("error", "; ".join(map(str, failed)))
        part["seconds"] = clock() - start
        for table in part_tables(name, rows):
            console.print(table)
        click.echo(f"{name}: {part.get('error', 'done')}, {part['seconds']:.0f} s", err=True)
        if out is not None:
            write_result(content, out)
        if "error" in part and device_is_lost(device):
            raise UserError(f"{name} has left the device unusable: continue by the same command with --skip '{name}'")
        free_memory(device)


def rows_or_error(step: Callable[[], Rows], device: torch.device) -> Rows:
    """The rows of a step, followed by an error row if it fails; raises if the failure left the device unusable."""
    try:
        yield from step()
    except Exception as error:  # the other steps still run
        if device_is_lost(device):
            raise
        yield {"error": _message(error), "where": traceback.format_exc()[-2000:]}
    free_memory(device)


def device_is_lost(device: torch.device) -> bool:
    """Whether this process can no longer use the device, e.g. after an illegal memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def free_memory(device: torch.device) -> None:
    """Free unused models and torch's cached memory."""
    gc.collect()  # captured CUDA graphs and their model form reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def part_tables(name: str, rows: list[dict[str, Any]]) -> Iterator[Table]:
    """A table for each group of consecutive rows with the same columns."""
    for columns, group in itertools.groupby(rows, key=tuple):
        cells: list[Column] = [(column, partial(_cell, column)) for column in columns]
        yield make_table(cells, list(group), title=name)


def _cell(column: str, row: Mapping[str, Any]) -> str:
    return _format(row[column])


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_format(part)}" for key, part in value.items())
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
