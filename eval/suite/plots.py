"""Plots of a run's results."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mmspec.eval.harness.timing import PHASES
from mmspec.eval.suite.summary import ALL
from mmspec.training.curve import write_figure

Figures = dict[str, Any]


def draw_all(rows: Sequence[Figures], folder: Path) -> dict[str, str]:
    """Draw all plots that the rows have data for, at the first temperature and batch size.

    Returns:
        File names in ``folder`` by title.
    """
    head = rows[0]
    alike = [row for row in rows if (row["temperature"], row["batch"]) == (head["temperature"], head["batch"])]
    whole = [row for row in alike if row["task"] == head["task"]]
    phased = [row for row in whole if row["shares"]]
    drafting = [row for row in phased if row["acceptance"] and row["acceptance"]["draft_acceptance_rate"] > 0]
    sized = drafting if any(row["method"].partition("@")[2].isdecimal() for row in drafting) else []
    others = [row for row in alike if row["method"] != row["baseline"]]
    tasks = [row for row in others if row["task"] != ALL]
    plots = {
        "speedup": (
            f"Speed against {head['baseline']}",
            _speedup,
            [row for row in others if row["task"] == head["task"]],
        ),
        "tasks": ("Speed by task", _by_task, tasks if len({row["task"] for row in tasks}) > 1 else []),
        "accepted": ("Accepted draft tokens per step", _histogram, drafting),
        "positions": ("Acceptance by position", _positions, drafting),
        "time": ("Where the time goes", _time, phased),
        "tree-size": ("Speed by tree size", _tree_size, sized),
    }
    drawn = {}
    for name, (title, draw, shown) in plots.items():
        if shown:
            tall = draw in (_speedup, _by_task, _histogram, _time)
            figure = Figure(figsize=(9, 1.6 + 0.3 * len(whole) if tall else 4.2))
            figure.set_layout_engine("constrained")
            draw(figure.subplots(), shown)
            write_figure(figure, folder / f"{name}.svg")
            drawn[title] = f"{name}.svg"
    return drawn


def _speedup(axes: Axes, rows: Sequence[Figures]) -> None:
    for shift, (figure, label) in enumerate((("decoding", "decoding alone"), ("end_to_end", "whole request"))):
        points = [(place, row[figure]) for place, row in enumerate(rows) if row[figure]]
        middle = [ratio["median"] for _, ratio in points]
        ends = [[r["median"] - r["low"] for _, r in points], [r["high"] - r["median"] for _, r in points]]
        places = [place + 0.38 * shift - 0.19 for place, _ in points]
        axes.barh(places, middle, 0.36, xerr=ends, label=label, color=f"C{shift}", error_kw={"elinewidth": 1})
        for place, value in zip(places, middle, strict=True):
            axes.text(0.03, place, f"{value:.2f}", va="center", fontsize=7, color="white")
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.4", linewidth=0.8)
    axes.set_xlabel(f"times as fast as {rows[0]['baseline']} (median, 95 % interval)")
    axes.legend(fontsize=8)


def _by_task(axes: Axes, rows: Sequence[Figures]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    speedups = {(row["method"], row["task"]): row["end_to_end"] for row in rows}
    methods = list(dict.fromkeys(method for method, _ in speedups))
    ratios = [[speedups.get((method, task)) for task in tasks] for method in methods]
    _grid(axes, methods, tasks, [[ratio["median"] if ratio else nan for ratio in row] for row in ratios], "{:.2f}x")
    axes.set_xlabel(f"whole request, times as fast as {rows[0]['baseline']}")


def _histogram(axes: Axes, rows: Sequence[Figures]) -> None:
    counts = [row["acceptance"]["histogram"] for row in rows]
    most = max(map(len, counts))
    shares = [[100 * count / sum(row) for count in row] + [nan] * (most - len(row)) for row in counts]
    _grid(axes, [row["method"] for row in rows], list(map(str, range(most))), shares, "{:.0f} %")
    axes.set_xlabel("accepted draft tokens: share of steps")


def _grid(axes: Axes, rows: Sequence[str], columns: Sequence[str], values: list[list[float]], form: str) -> None:
    """A heat map with its values; NaN cells are empty."""
    most = max(value for row in values for value in row if value == value)
    axes.imshow(values, aspect="auto", cmap="Blues", vmin=0, vmax=most)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value == value:
                color = "white" if value > 0.6 * most else "black"
                axes.text(j, i, form.format(value), ha="center", va="center", fontsize=7, color=color)
    slanted: Figures = {"rotation": 20, "ha": "right"} if max(map(len, columns)) > 8 else {}
    axes.set_xticks(range(len(columns)), columns, **slanted)
    axes.set_yticks(range(len(rows)), rows)


def _positions(axes: Axes, rows: Sequence[Figures]) -> None:
    colors = _colors(rows)
    for row in rows:
        shares, (drafter, _, shape) = row["acceptance"]["acceptance_by_position"], row["method"].partition("@")
        dash = {"": "-", "tree": "-"}.get(shape, ":" if shape.isdecimal() else "--")
        style: Figures = {"color": colors[drafter], "linestyle": dash, "marker": "o", "markersize": 3}
        axes.plot(range(1, len(shares) + 1), shares, label=row["method"], **style)
    axes.set(xlabel="position in the draft", ylabel="share of steps that accepted it", ylim=(0, 1))
    axes.legend(fontsize=8, ncols=2)


def _colors(rows: Sequence[Figures]) -> dict[str, str]:
    """One color per drafter, whatever the tree shape."""
    return {name: f"C{k}" for k, name in enumerate(dict.fromkeys(row["method"].partition("@")[0] for row in rows))}


def _time(axes: Axes, rows: Sequence[Figures]) -> None:
    names = [row["method"] for row in rows]
    left = [0.0] * len(rows)
    for part in (*PHASES, "rest"):
        shares = [row["shares"][part] for row in rows]
        axes.barh(names, shares, left=left, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of a request's time", xlim=(0, 1))
    axes.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _tree_size(axes: Axes, rows: Sequence[Figures]) -> None:
    sizes: set[int] = set()
    for drafter, color in _colors(rows).items():
        parts = [(*row["method"].partition("@")[::2], row["decoding"]) for row in rows if row["decoding"]]
        mine = {shape: ratio for name, shape, ratio in parts if name == drafter}
        fixed = sorted((int(shape), ratio["median"]) for shape, ratio in mine.items() if shape.isdecimal())
        if fixed:
            sizes |= {size for size, _ in fixed}
            axes.plot(*zip(*fixed, strict=True), marker="o", color=color, label=drafter)
            if "" in mine:
                axes.axhline(mine[""]["median"], linestyle="--", color=color, label=f"{drafter}, adaptive")
    axes.set(
        xlabel="draft tokens per step", ylabel=f"decoding, times {rows[0]['baseline']}", xscale="log", ylim=(0, None)
    )
    axes.set_xticks(sorted(sizes), list(map(str, sorted(sizes))))
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="lower right")
