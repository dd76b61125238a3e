"""A run's report in Markdown, with plots if matplotlib is installed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from mmspec.errors import install
from mmspec.eval.harness.output import Cell, Column, cell_text, markdown, mebibytes, milliseconds, wide_console
from mmspec.eval.harness.timing import PHASES
from mmspec.eval.suite.methods import PLAIN
from mmspec.eval.suite.summary import ALL, PERCENTILES
from mmspec.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = dict[str, Any]


def equal_of_compared(row: Mapping[str, Any]) -> str:
    """Cell of the number of equal answers; empty where none was compared."""
    return f"{row['equal']}/{row['compared']}" if row["compared"] else ""


def _interval(field: str) -> str:
    """Cell of a speedup with its interval, which brief tables leave out."""
    return f"{{{field}[median]:.2f}}x ({{{field}[low]:.2f}} to {{{field}[high]:.2f}})"


_LONGER = "{acceptance_difference[difference]:+.2f} "
_LONGER += "({acceptance_difference[low]:+.2f} to {acceptance_difference[high]:+.2f})"
_METHOD = "`none` is our own plain decoding"
_EQUAL = "answers with the tokens of `{baseline}`; above temperature 0, of `none` with the same seed"
_LATENCY = "latency from the start of a request's batch to its last token"
COLUMNS: Sequence[tuple[str, Cell, str]] = (
    ("method", lambda row: row["method"] + ("" if row.get("lossless", True) else " (not lossless)"), _METHOD),
    ("tokens per step", "{acceptance[mean_acceptance_length]:.2f}", "per verify step, bonus token included"),
    ("longer by", _LONGER, "difference in tokens per step to the first method that drafts, on the same conversations"),
    ("a draft", "{draft_cost:.2f}", "time to draft a tree, in passes over one node"),
    ("whole request", _interval("end_to_end"), "speedup over `{baseline}`, preprocessing and prefill included"),
    ("vs llama.cpp", _interval("end_to_end_llama"), "the same over its plain decoding, whose answers differ"),
    ("decoding", _interval("decoding"), "speedup over `{baseline}` after the first token"),
    (
        "vs none",
        lambda row: cell_text(_interval("decoding_plain"), row) * (row["baseline"] != PLAIN),
        "the same over `none`",
    ),
    ("tokens/s", "{tokens_per_second:.1f}", "tokens per second of whole requests"),
    ("first token", milliseconds("time_to_first_token", 1), "milliseconds to it"),
    ("memory", mebibytes("memory"), "peak in MiB of the process on a CPU, of torch's tensors on a GPU"),
    ("equal", equal_of_compared, _EQUAL),
    (
        "score",
        lambda row: ", ".join(f"{k} {x:.3g}" for k, x in row.get("score", {}).items()),
        "of the answers; on a terminal, the column has the name of the measure",
    ),
)
"""Name, cell and meaning."""

REQUEST_COLUMNS: Sequence[tuple[str, Cell, str]] = (
    ("method", "{method}", _METHOD),
    ("requests of", "{category}", "category"),
    ("number", "{requests}", "of requests"),
    ("MAT", "{mean_accepted_tokens:.2f}", "mean accepted tokens per verify step, bonus token included"),
    ("speedup", "{walltime_speedup:.2f}x", "mean ratio of the requests' tokens per second to `none`"),
    ("slowest", "{slowest[total]:.2f}x", "least of these ratios"),
    ("throughput", "{throughput_speedup:.2f}x", "ratio to `none` of the output tokens per second of all batches"),
    *((f"p{p} ms", lambda row, p=p: f"{1000 * row['latency'][f'p{p}']:.1f}", _LATENCY) for p in PERCENTILES),
    ("output tokens/s", "{output_tokens_per_second:.1f}", "over all batches"),
    ("user tokens/s", "{user_tokens_per_second[mean]:.1f}", "mean tokens per second of a request after its first"),
    ("equal", equal_of_compared, _EQUAL),
)

PUBLISHED = "Published results, on others' hardware"

_DIFFERENCES: Sequence[Column] = (
    ("method", "`{method}`"),
    ("temperature", "{temperature:g}"),
    ("batch", "{batch}"),
    ("sample", "{task} {id}, turn {turn}"),
    ("token", "{position}"),
    ("logit margin", "{margin:.3g}"),
)


def published() -> tuple[list[str], list[list[str]]]:
    """Header and cells of the results of papers and projects, measured on their authors' hardware."""
    rows = tomllib.loads((Path(__file__).parents[1] / "published.toml").read_text(encoding="utf-8"))["results"]
    return [*rows[0]], [[*row.values()] for row in rows]


def write_report(summary: dict[str, Any], folder: Path, others: bool = False) -> Path:
    """Write the report; ``others``: with the published results."""
    about, settings, rows = summary["about"], summary["settings"], summary["rows"]
    lines = [f"# {about['model']}", "", _introduction(about, settings), ""]
    lines += [f"- {line}" for line in legend(rows)] + [""]
    lines += _pictures(rows, folder)
    for title, group in _by_condition(rows):
        lines += [f"## {title}", "", *markdown(*_table(group)), "", *markdown(*_request_table(group))]
        notes = [_copy_oracle(group), f"Not scored: {group[0]['not_scored']}" if "not_scored" in group[0] else ""]
        lines += ["", *(line for note in notes if note for line in (f"{note}.", ""))]
    lines += _differences(rows)
    if refused := refusals(summary):
        lines += ["## Not supported", "", *(f"- {line}" for line in refused)]
    if others:
        lines += ["", f"## {PUBLISHED}", "", *markdown(*published())]
    path = folder / "report.md"
    write_text(path, "\n".join(lines).rstrip() + "\n")
    return path


def refusals(summary: dict[str, Any]) -> list[str]:
    """A line per refused method and batch size; reasons are the same at every temperature."""
    each = (f"`{one['method']}`, batch {one['batch']}: refused: {one['reason']}" for one in summary["refused"])
    return list(dict.fromkeys(each))


def _cells(columns: Sequence[tuple[str, Cell, str]], rows: Sequence[Figures]) -> tuple[list[str], list[list[str]]]:
    """Header and cells, without columns that are empty."""
    parts = [(name, [cell_text(cell, row) for row in rows]) for name, cell, _ in columns]
    kept = [(name, part) for name, part in parts if any(part)]
    return [name for name, _ in kept], [list(line) for line in zip(*(part for _, part in kept), strict=True)]


def _table(rows: Sequence[Figures], brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the methods; if ``brief``, without intervals, secondary scores and names of scores."""
    if not brief:
        return _cells(COLUMNS, rows)
    *columns, _ = COLUMNS
    if name := next(iter(rows[0].get("score", {})), None):
        columns.append((name, f"{{score[{name}]:.3g}}", ""))
    header, cells = _cells(columns, rows)
    return header, [[line[0], *(cell.partition(" (")[0] for cell in line[1:])] for line in cells]


def _request_table(rows: Sequence[Figures], brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the statistics by request; if ``brief``, without categories."""
    each = [
        {"method": row["method"], "category": None if brief else name, **found}
        for row in rows
        for name, found in [*row["requests"].items()][: 1 if brief else None]
    ]
    return _cells(REQUEST_COLUMNS, each)


def _by_condition(rows: Sequence[Figures]) -> Iterator[tuple[str, list[Figures]]]:
    """A title and the rows of each task, temperature and batch size."""
    for key in dict.fromkeys((row["task"], row["temperature"], row["batch"]) for row in rows):
        group = [row for row in rows if (row["task"], row["temperature"], row["batch"]) == key]
        yield f"{key[0]}, temperature {key[1]:g}, batch {key[2]}", group


def print_summary(summary: dict[str, Any], others: bool = False) -> None:
    """Print the tables of methods and requests per task, temperature and batch size, split to fit the terminal, and
    their legend; ``others``: with the published results."""
    console = wide_console()
    for title, group in _by_condition(summary["rows"]):
        for name, (header, cells) in {
            title: _table(group, brief=True),
            f"{title}, by request": _request_table(group, brief=True),
        }.items():
            parts = (*zip(*cells, strict=True),)
            widths = [max(map(len, (*head.split(), *part))) for head, part in zip(header, parts, strict=True)]
            for columns in _fitting(widths, console.width):
                table = Table(title=name, caption=_copy_oracle(group) if name == title and 1 in columns else None)
                for column in columns:
                    table.add_column(header[column], width=min(widths[column], console.width // 2), overflow="fold")
                for row in cells:
                    table.add_row(*(row[column] for column in columns))
                console.print(table)
    for line in [*legend(summary["rows"]), *refusals(summary)]:
        click.echo(line)
    if others:
        header, cells = published()
        table = Table(*header, title=PUBLISHED)
        for row in cells:
            table.add_row(*row)
        console.print(table)


def _fitting(widths: Sequence[int], width: int) -> list[list[int]]:
    """Column indices of tables at most ``width`` wide; each table includes the first column."""
    groups, left = list[list[int]](), 0
    for column, own in enumerate(widths[1:], start=1):
        if own + 3 > left:  # with border and padding
            groups.append([0])
            left = width - min(widths[0], width // 2) - 4
        groups[-1].append(column)
        left -= own + 3
    return groups


def legend(rows: Sequence[Figures]) -> list[str]:
    """Legend of the tables, a line per column."""
    shown = [*_table(rows)[0], *_request_table(rows)[0]]
    names: dict[str, list[str]] = {}
    for name, text in {name: text for name, _, text in (*COLUMNS, *REQUEST_COLUMNS)}.items():
        names.setdefault(text.format(baseline=rows[0]["baseline"]), []).extend({name} & {*shown})
    return [f"{', '.join(each)}: {text}" for text, each in names.items() if each]


def _copy_oracle(rows: Sequence[Figures]) -> str:
    """Upper bound of copying drafters in a line; empty if it was not measured."""
    for found in filter(None, (row.get("copy_oracle") for row in rows)):
        lengths = ", ".join(f"{found['tokens_per_step'][most]:.2f}" for most in ("8", "16", "32"))
        speedup = f"at best {found['speedup']:.2f}x none, with {_count(found['draft_tokens'], 'token')} a draft"
        return f"copy oracle: {lengths} tokens per step with drafts of up to 8, 16, 32 tokens; {speedup}"
    return ""


def _introduction(about: dict[str, Any], settings: dict[str, Any]) -> str:
    threads = f", {_count(about['threads'], 'thread')}" if about["threads"] else ""
    return (
        f"{about['architecture']}, {about['dtype']}, on {about['device']}{threads}; torch {about['torch']}, "
        f"transformers {about['transformers']}. All methods answer every conversation, interleaved in one process, "
        f"{_count(settings['rounds'], 'round')} after a warm-up; times are medians over the rounds. Speedups are of "
        "seconds per token, by conversation, then their median over the conversations with its 95 % bootstrap "
        "interval. Second tables are of requests, overall and by category; transformers returns the rows of a batch "
        "together. The `copy oracle` knows the answers of `none` and drafts the longest copy of earlier text that "
        "they confirm; its speedup follows from the measured times of passes. Columns:"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _pictures(rows: Sequence[Figures], folder: Path) -> list[str]:
    """Links to the plots, which are drawn for the first temperature and batch size."""
    try:
        drawn = draw_all(rows, folder / "plots")
    except ImportError:
        return [f"No plots: they need the package matplotlib; run {install('eval')}.", ""]
    conditions = list(dict.fromkeys((row["temperature"], row["batch"]) for row in rows))
    which = []
    if len(conditions) > 1:
        which = [f"The plots show temperature {conditions[0][0]:g}, batch {conditions[0][1]}.", ""]
    return which + [line for title, name in drawn.items() for line in (f"![{title}](plots/{name})", "")]


def _differences(rows: Sequence[Figures]) -> list[str]:
    found = [{**row, **difference} for row in rows if "score" in row for difference in row["differences"]]
    if not found:
        return []
    cells = [[cell_text(cell, one) for _, cell in _DIFFERENCES] for one in found]
    return [
        "## Answers that differ",
        "",
        "The logit margin is the target's highest logit at the first difference minus the lower of the two tokens'",
        "logits: near zero where rounding decides. It is not computed for sampled answers.",
        "",
        *markdown([name for name, _ in _DIFFERENCES], cells),
        "",
    ]


def draw_all(rows: Sequence[Figures], folder: Path) -> dict[str, str]:
    """Draw all plots that the rows have data for, at the first temperature and batch size; returns file names by
    title."""
    from matplotlib.figure import Figure

    from mmspec.training.curve import write_figure

    head = rows[0]
    alike = [row for row in rows if (row["temperature"], row["batch"]) == (head["temperature"], head["batch"])]
    whole = [row for row in alike if row["task"] == head["task"]]
    phased = [row for row in whole if row["shares"]]
    drafting = [row for row in phased if row["acceptance"] and row["acceptance"]["draft_acceptance_rate"] > 0]
    sized = drafting if any(row["method"].partition("@")[2].isdecimal() for row in drafting) else []
    others = [row for row in alike if row["method"] != row["baseline"]]
    tasks = [row for row in others if row["task"] != ALL]
    plots = {
        "speedup": (f"Speed against {head['baseline']}", _speedup, [row for row in others if row in whole]),
        "tasks": ("Speed by task", _by_task, tasks if len({row["task"] for row in tasks}) > 1 else []),
        "accepted": ("Accepted draft tokens per step", _histogram, drafting),
        "time": ("Where the time goes", _time, phased),
        "tree-size": ("Speed by tree size", _tree_size, sized),
    }
    drawn = {}
    for name, (title, draw, shown) in plots.items():
        if shown:
            figure = Figure(figsize=(9, 4.2 if draw is _tree_size else 1.6 + 0.3 * len(whole)))
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


def _time(axes: Axes, rows: Sequence[Figures]) -> None:
    names = [row["method"] for row in rows]
    left = [0.0] * len(rows)
    for part in (*PHASES, "rest"):
        shares = [row["shares"].get(part, 0.0) for row in rows]  # older records count towers as prefill
        axes.barh(names, shares, left=left, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of a request's time", xlim=(0, 1))
    axes.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _tree_size(axes: Axes, rows: Sequence[Figures]) -> None:
    sizes: set[int] = set()
    drafters = dict.fromkeys(row["method"].partition("@")[0] for row in rows)
    for color, drafter in ((f"C{number}", drafter) for number, drafter in enumerate(drafters)):
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
