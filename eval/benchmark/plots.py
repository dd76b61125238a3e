"""Pictures of a run's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.benchmark.methods import BASELINE
from eval.benchmark.summary import ALL
from eval.rounds import PARTS
from mmspec.training.curve import write_figure

Row = dict[str, Any]


def draw_all(rows: Sequence[Row], folder: Path) -> dict[str, str]:
    """Draw all pictures that the rows give something for, of the first temperature and batch size.

    Returns:
        File names in ``folder`` by what they show.
    """
    head = rows[0]
    alike = [row for row in rows if (row["temperature"], row["batch"]) == (head["temperature"], head["batch"])]
    whole = [row for row in alike if row["task"] == head["task"]]
    ours = [row for row in whole if row["shares"]]
    drafting = [row for row in ours if row["acceptance"] and row["acceptance"]["draft_acceptance_rate"] > 0]
    sized = [row for row in drafting if row["method"].partition("@")[2].isdecimal()]
    tasks = [row for row in alike if row["task"] != ALL]
    pictures = {
        "speedup": ("Speed against transformers' generate", _speedup, whole),
        "tasks": ("Speed by task", _by_task, tasks if len({row["task"] for row in tasks}) > 1 else []),
        "accepted": ("Accepted drafts per step", _histogram, drafting),
        "positions": ("Acceptance by position", _positions, drafting),
        "time": ("Where the time goes", _time, ours),
        "tree-size": ("Speed by tree size", _tree_size, sized),
    }
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, (title, draw, shown) in pictures.items():
        if shown:
            figure = Figure(figsize=(9, 1.6 + 0.3 * len(whole) if draw in (_speedup, _time) else 4.2))
            figure.set_layout_engine("constrained")
            axes = figure.subplots()
            palette = colormaps["tab20" if len(whole) > 10 else "tab10"]
            axes.set_prop_cycle(color=[palette(k) for k in range(palette.N)])
            draw(axes, shown)
            write_figure(figure, folder / f"{name}.svg")
            drawn[title] = f"{name}.svg"
    return drawn


def _speedup(axes: Axes, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["method"] != BASELINE]
    for shift, (figure, label) in enumerate((("decoding", "decoding alone"), ("end_to_end", "whole request"))):
        having = [(place, row[figure]) for place, row in enumerate(rows) if row[figure]]
        middle = [ratio["median"] for _, ratio in having]
        ends = [[r["median"] - r["low"] for _, r in having], [r["high"] - r["median"] for _, r in having]]
        places = [place + 0.38 * shift - 0.19 for place, _ in having]
        axes.barh(places, middle, 0.36, xerr=ends, label=label, color=f"C{shift}", error_kw={"elinewidth": 1})
        for place, value in zip(places, middle, strict=True):
            axes.text(0.03, place, f"{value:.2f}", va="center", fontsize=7, color="white")
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.4", linewidth=0.8)
    axes.set_xlabel("times as fast as transformers' generate (median, 95 % interval)")
    axes.legend(fontsize=8)


def _by_task(axes: Axes, rows: Sequence[Row]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for row_method in dict.fromkeys(row["method"] for row in rows if row["method"] != BASELINE):
        found = {row["task"]: row["end_to_end"] for row in rows if row["method"] == row_method}
        values = [found[task]["median"] if found.get(task) else float("nan") for task in tasks]
        axes.plot(tasks, values, marker="o", label=row_method)
    axes.axhline(1.0, color="0.4", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right")
    axes.set_ylabel("whole request, times generate")
    axes.legend(fontsize=7, ncols=2)


def _histogram(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        counts = row["acceptance"]["histogram"]
        axes.plot(range(len(counts)), [count / sum(counts) for count in counts], marker="o", label=row["method"])
    axes.set(xlabel="accepted drafts in a step", ylabel="share of steps")
    axes.legend(fontsize=8)


def _positions(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        shares = row["acceptance"]["acceptance_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=row["method"])
    axes.set(xlabel="position in the draft", ylabel="share of steps that got so far", ylim=(0, 1))
    axes.legend(fontsize=8)


def _time(axes: Axes, rows: Sequence[Row]) -> None:
    names = [row["method"] for row in rows]
    left = [0.0] * len(rows)
    for part in (*PARTS, "rest"):
        shares = [row["shares"][part] for row in rows]
        axes.barh(names, shares, left=left, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of a request's time", xlim=(0, 1))
    axes.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _tree_size(axes: Axes, rows: Sequence[Row]) -> None:
    for drafter in dict.fromkeys(row["method"].partition("@")[0] for row in rows):
        points = sorted(
            (int(row["method"].partition("@")[2]), row["decoding"]["median"])
            for row in rows
            if row["method"].partition("@")[0] == drafter and row["decoding"]
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=drafter)
    sizes = sorted({int(row["method"].partition("@")[2]) for row in rows})
    axes.set(xlabel="drafted nodes per step", ylabel="decoding, times generate", xscale="log")
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.minorticks_off()
    axes.legend(fontsize=8)
