"""Running the parts of a measurement on a GPU so that no failure, and no end of time, loses more than it must; for
`eval.gpu`."""

from __future__ import annotations

import gc
import json
import platform
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch
import transformers
from rich.table import Table

from eval.harness.command import commit, console, write_result
from mmspec import kernels

Rows = Iterator[dict[str, Any]]
_SAME = ("device", "torch", "transformers", "commit", "quick")
"""What rows must have in common to be of one result."""


def machine(device: torch.device) -> dict[str, Any]:
    """What results depend on."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "kernels": kernels.in_use(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }
    if device.type == "cuda":
        import triton

        found: Any = torch.cuda.get_device_properties(device)
        facts |= {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "memory_bytes": found.total_memory,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return facts


def earlier(out: Path | None, content: Mapping[str, Any], skip: Collection[str]) -> dict[str, Any]:
    """Parts that an earlier run of the same on the same machine has finished, and those to skip, whatever became of
    them."""
    try:
        found = json.loads(out.read_text()) if out is not None else {}
    except (OSError, ValueError):
        return {}
    if any(found.get(key) != content[key] for key in _SAME):
        return {}
    return {
        name: part
        for name, part in found["parts"].items()
        if name in skip or ("seconds" in part and "error" not in part)
    }


def run(
    parts: Mapping[str, Callable[[], Rows]],
    content: dict[str, Any],
    out: Path | None,
    device: torch.device,
    skip: Collection[str] = (),
) -> list[str]:
    """Run every part into ``content`` that is not there, and write it after each row.

    Returns:
        Parts that were not begun, as the one before has left the device unusable.
    """
    wide = console()
    names = [name for name in parts if name not in content["parts"] and name not in skip]
    for number, name in enumerate(names):
        start = clock()
        rows: list[dict[str, Any]] = []  # those before a failure are kept
        found: dict[str, Any] = {"rows": rows}
        content["parts"][name] = found
        try:
            for row in parts[name]():
                rows.append(row)
                if out is not None:
                    write_result(content, out)
        except Exception as error:  # whatever it is, the other parts are worth having
            found["error"], found["where"] = described(error), traceback.format_exc()[-2000:]
        if failed := [row["error"] for row in rows if "error" in row]:
            found.setdefault("error", "; ".join(map(str, failed)))
        found["seconds"] = clock() - start
        for table in tables(name, rows):
            wide.print(table)
        click.echo(f"{name}: {found.get('error', 'done')}, {found['seconds']:.0f} s", err=True)
        if out is not None:
            write_result(content, out)
        if "error" in found and lost(device):
            return names[number + 1 :]
        give_back(device)
    return []


def attempt(step: Callable[[], Rows], device: torch.device) -> Rows:
    """The rows of a step; if it fails, a row that says so, unless the device is unusable then."""
    try:
        yield from step()
    except Exception as error:  # whatever it is, the other steps are worth having
        if lost(device):
            raise
        yield {"error": described(error), "where": traceback.format_exc()[-2000:]}
    give_back(device)


def lost(device: torch.device) -> bool:
    """Whether nothing can be run on a device any more in this process, as after a kernel that has left its memory."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def give_back(device: torch.device) -> None:
    """Models that are not used any more, and what was kept for more of their kind."""
    gc.collect()  # what is captured of a model refers to it
    if device.type == "cuda":
        torch.cuda.empty_cache()


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def tables(name: str, rows: list[dict[str, Any]]) -> Iterator[Table]:
    """A table for each run of rows with the same columns."""
    table: Table | None = None
    columns: list[str] = []
    for row in rows:
        if table is None or list(row) != columns:
            if table is not None:
                yield table
            columns = list(row)
            table = Table(*columns, title=name)
        table.add_row(*map(_shown, row.values()))
    if table is not None:
        yield table


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(part)}" for key, part in value.items())
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
