"""Plots of training curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mmspec.errors import explained
from mmspec.files import atomic, read_rows


def draw(log: Path, out: Path) -> None:
    """Plot losses (training: thin line, held-out: points) and mean acceptance lengths of a run by step, as SVG. Raises
    ``UserError``: the log is damaged, or ``out`` cannot be written."""
    rows, name = [row for _, row in read_rows(log)], log.resolve().parent.name
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, acceptance = figure.subplots(1, 2)
    _line(losses, rows, "train", "loss", alpha=0.5, label=name)
    _line(losses, rows, "held-out", "loss", marker=".", label=f"{name}, held-out")
    _line(acceptance, rows, "held-out", "mean_acceptance_length", marker=".", label=name)
    losses.set(xlabel="step", ylabel="loss", yscale="log")
    acceptance.set(xlabel="step", ylabel="mean acceptance length, held-out")
    acceptance.axhline(1.0, color="0.6", linewidth=0.8, label="_plain decoding")
    for axes in (losses, acceptance):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    write_figure(figure, out)


def _line(axes: Axes, rows: list[dict[str, Any]], event: str, name: str, **style: Any) -> None:
    points = [(row["step"], row[name]) for row in rows if row["event"] == event and name in row]
    if points:
        axes.plot(*zip(*points, strict=True), color="C0", **style)


def write_figure(figure: Figure, out: Path) -> None:
    """Write a plot as SVG, atomically. Without a date and with fixed ids, the file is reproducible."""
    with explained(f"cannot write {out}", OSError), rc_context({"svg.hashsalt": "mmspec"}), atomic(out) as part:
        figure.savefig(part, format="svg", metadata={"Date": None})
