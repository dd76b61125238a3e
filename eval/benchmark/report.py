"""A run's report in Markdown, with pictures where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmspec.extras import install
from mmspec.training.files import write_text

Row = dict[str, Any]
COLUMNS = (
    "method",
    "tokens per pass",
    "whole request",
    "decoding",
    "vs none",
    "tokens/s",
    "first token",
    "memory",
    "equal",
    "score",
)


def write_report(summary: dict[str, Any], folder: Path) -> Path:
    """Write ``report.md`` and its ``plots/``.

    Args:
        summary: what ``summary.json`` holds.
        folder: of the run.
    """
    about, settings, rows = summary["about"], summary["settings"], summary["rows"]
    lines = [f"# {about['model']}", "", _introduction(about, settings), ""]
    lines += _pictures(rows, folder)
    for title, found in by_cell(rows):
        lines += [f"## {title}", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines += [f"| {' | '.join(cells(row))} |" for row in found]
        lines += ["", *([f"Not scored: {found[0]['not_scored']}.", ""] if "not_scored" in found[0] else [])]
    lines += _differences(rows)
    if summary["refused"]:
        lines += ["## What transformers does not decode here", ""]
        told = [f"- `{one['method']}`, batch {one['batch']}: {one['reason']}" for one in summary["refused"]]
        lines += dict.fromkeys(told)  # the same at every temperature
    path = folder / "report.md"
    write_text(path, "\n".join(lines).rstrip() + "\n")
    return path


def cells(row: Row, brief: bool = False) -> list[str]:
    """A row of figures as ``COLUMNS`` name them; if ``brief``, without intervals, lesser scores and names."""
    scores = [f"{value:.3g}" if brief else f"{name} {value:.3g}" for name, value in row.get("score", {}).items()]
    return [
        row["method"],
        f"{row['acceptance']['mean_acceptance_length']:.2f}" if row["acceptance"] else "",
        _ratio(row["end_to_end"], brief),
        _ratio(row["decoding"], brief),
        _ratio(row["decoding_plain"], brief),
        f"{row['tokens_per_second']:.1f}",
        f"{1000 * row['time_to_first_token']:.1f} ms",
        "" if row["memory"] is None else f"{row['memory'] / 2**20:.0f} MiB",
        f"{row['equal']}/{row['compared']}" if row["compared"] else "",
        ", ".join(scores[: 1 if brief else None]),
    ]


def by_cell(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each task, temperature and batch size, with a title."""
    for cell in dict.fromkeys((row["task"], row["temperature"], row["batch"]) for row in rows):
        found = [row for row in rows if (row["task"], row["temperature"], row["batch"]) == cell]
        yield f"{cell[0]}, temperature {cell[1]:g}, batch {cell[2]}", found


def _ratio(found: dict[str, float] | None, brief: bool) -> str:
    if found is None:
        return ""
    return f"{found['median']:.2f}x" + ("" if brief else f" ({found['low']:.2f} to {found['high']:.2f})")


def _introduction(about: dict[str, Any], settings: dict[str, Any]) -> str:
    threads = f", {_count(about['threads'], 'thread')}" if about["threads"] else ""
    return (
        f"{about['architecture']}, {about['dtype']}, on {about['device']}{threads}; torch {about['torch']}, "
        f"transformers {about['transformers']}. Every method answers every conversation in turn in one process, "
        f"{_count(settings['rounds'], 'round')} "
        "after a warm-up; times are medians over the rounds. Ratios are of seconds per token, by conversation, then "
        "their median over the conversations with its 95 % bootstrap interval: `whole request` (preprocessing and "
        "prefill included) and `decoding` (behind the first token) against transformers' `generate`, `vs none` "
        "decoding against our own plain decoding. `equal` counts answers whose tokens are those of `generate` at "
        "temperature 0 and of `none` with the same seed above it. Memory is the peak of the process on a CPU, of "
        "torch's tensors on a GPU."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _pictures(rows: Sequence[Row], folder: Path) -> list[str]:
    try:
        from eval.benchmark.plots import draw_all
    except ImportError:
        return [f"No plots: they need the package matplotlib; run {install('eval')}.", ""]
    drawn = draw_all(rows, folder / "plots")
    cells = list(dict.fromkeys((row["temperature"], row["batch"]) for row in rows))
    which = [f"The pictures show temperature {cells[0][0]:g}, batch {cells[0][1]}.", ""] if len(cells) > 1 else []
    return which + [line for title, name in drawn.items() for line in (f"![{title}](plots/{name})", "")]


def _differences(rows: Sequence[Row]) -> list[str]:
    found = [(row, one) for row in rows if "score" in row for one in row["differences"]]
    if not found:
        return []
    lines = [
        "## Answers that differ",
        "",
        "The logit margin is the target's highest logit at the first difference less the lower one of the two tokens':",
        "near nothing where rounding decides. Sampled answers have none: a draw near a border falls to its other side.",
        "",
        "| method | temperature | batch | sample | token | logit margin |",
        "|---|---|---|---|---|---|",
    ]
    for row, one in found:
        margin = "" if one["margin"] is None else f"{one['margin']:.3g}"
        where = f"{one['task']} {one['id']}, turn {one['turn']}"
        cell = f"{row['temperature']:g} | {row['batch']}"
        lines.append(f"| `{row['method']}` | {cell} | {where} | {one['position']} | {margin} |")
    return [*lines, ""]
