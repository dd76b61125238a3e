"""Plots of training curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mmspec.errors import UserError, explained
from mmspec.files import atomic


def draw(logs: Sequence[Path], out: Path, names: Sequence[str] = (), against: str = "step") -> None:
    """Plots losses (training: thin line, held-out: points) and mean acceptance lengths, one colour per run.

    Args:
        logs: `log.jsonl` of each run.
        out: file to write; its suffix is the format.
        names: legend names of the runs; by default their folders' names.
        against: horizontal axis, "step" or "minutes".

    Raises:
        UserError: the numbers of names and logs differ, a file is not a training log, or `out` cannot be written.
    """
    names = names or [log.resolve().parent.name for log in logs]
    if len(names) != len(logs):
        raise UserError(f"each log needs one name: expected {len(logs)} names, received {len(names)}")
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, acceptance = figure.subplots(1, 2)
    for index, (log, name) in enumerate(zip(logs, names, strict=True)):
        rows, colour = read(log), f"C{index}"
        _line(losses, rows, "train", against, "loss", color=colour, alpha=0.5, label=name)
        _line(losses, rows, "held-out", against, "loss", color=colour, marker=".", label=f"{name}, held-out")
        _line(acceptance, rows, "held-out", against, "mean_acceptance_length", color=colour, marker=".", label=name)
    losses.set(xlabel=against, ylabel="loss", yscale="log")
    acceptance.set(xlabel=against, ylabel="mean acceptance length, held-out")
    acceptance.axhline(1.0, color="0.6", linewidth=0.8, label="_plain decoding")
    for axes in (losses, acceptance):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    write_figure(figure, out)


def read(log: Path) -> list[dict[str, Any]]:
    """Reads the rows of a training log."""
    with explained(f"{log}: expected the log.jsonl of a training run", OSError, ValueError, TypeError):
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        if all("event" in row and "step" in row for row in rows):
            return rows
        raise ValueError("rows without event and step")


def _line(axes: Axes, rows: list[dict[str, Any]], event: str, against: str, name: str, **style: Any) -> None:
    points = [(row[against], row[name]) for row in rows if row["event"] == event and name in row]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def write_figure(figure: Figure, out: Path) -> None:
    """Writes a figure atomically; the suffix of `out` is the format, SVG if there is none.

    Raises:
        UserError: it cannot be written.
    """
    kind = out.suffix.lstrip(".") or "svg"
    # Without a date and with fixed ids the same log gives the same file.
    stable = rc_context({"svg.hashsalt": "mmspec"})
    with explained(f"cannot write {out}", OSError, ValueError), stable, atomic(out) as part:
        figure.savefig(part, format=kind, metadata={"Date": None} if kind == "svg" else None)
