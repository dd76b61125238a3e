"""A run's report in Markdown, with plots if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mmspec.errors import install
from mmspec.eval.suite.methods import PLAIN
from mmspec.eval.suite.summary import PERCENTILES
from mmspec.files import write_text

Figures = dict[str, Any]
COLUMNS = {
    "method": "`none` is our own plain decoding",
    "tokens per step": "per verify step, bonus token included",
    "longer by": "difference in tokens per step to the first method that drafts, on the same conversations",
    "a draft": "time to draft a tree, in passes over one node",
    "whole request": "speedup over `{baseline}`, preprocessing and prefill included",
    "vs llama.cpp": "the same over its plain decoding of the GGUF file, whose arithmetic and answers differ",
    "decoding": "speedup over `{baseline}` after the first token",
    "vs none": "the same over `none`",
    "tokens/s": "tokens per second of whole requests",
    "first token": "milliseconds to it",
    "memory": "peak in MiB of the process on a CPU, of torch's tensors on a GPU",
    "equal": "answers with the tokens of `{baseline}`; above temperature 0, of `none` with the same seed",
    "score": "of the answers; on a terminal, the column has the name of the measure",
}
REQUEST_COLUMNS = {
    "method": COLUMNS["method"],
    "requests of": "category",
    "number": "of requests",
    "MAT": "mean accepted tokens per verify step, bonus token included",
    "speedup": "mean ratio of the requests' tokens per second to `none`",
    "slowest": "least of these ratios",
    "throughput": "ratio to `none` of the output tokens per second of all batches",
    **{f"p{p} ms": "latency from the start of a request's batch to its last token" for p in PERCENTILES},
    "output tokens/s": "over all batches",
    "user tokens/s": "mean tokens per second of a request after its first token",
    "equal": COLUMNS["equal"],
}


def write_report(summary: dict[str, Any], folder: Path) -> Path:
    """Write ``report.md`` and its ``plots/``."""
    about, settings, rows = summary["about"], summary["settings"], summary["rows"]
    lines = [f"# {about['model']}", "", _introduction(about, settings), ""]
    lines += [f"- {line}" for line in legend(rows)] + [""]
    lines += _pictures(rows, folder)
    for title, group in _by_condition(rows):
        lines += [f"## {title}", "", *_markdown(*_table(group)), "", *_markdown(*_request_table(group))]
        notes = [_copy_oracle(group), f"Not scored: {group[0]['not_scored']}" if "not_scored" in group[0] else ""]
        lines += ["", *(line for note in notes if note for line in (f"{note}.", ""))]
    lines += _differences(rows)
    if refused := refusals(summary):
        lines += ["## Not supported", "", *(f"- {line}" for line in refused)]
    path = folder / "report.md"
    write_text(path, "\n".join(lines).rstrip() + "\n")
    return path


def refusals(summary: dict[str, Any]) -> list[str]:
    """A line per refused method and batch size; reasons are the same at every temperature."""
    each = (f"`{one['method']}`, batch {one['batch']}: refused: {one['reason']}" for one in summary["refused"])
    return list(dict.fromkeys(each))


def _markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(f"| {' | '.join(line)} |" for line in cells)]


def _kept(header: Sequence[str], cells: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells, without columns that are empty."""
    kept = [column for column in range(len(header)) if any(line[column] for line in cells)]
    return [header[column] for column in kept], [[line[column] for column in kept] for line in cells]


def _request_table(rows: Sequence[Figures], brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the statistics by request; if ``brief``, without categories."""
    cells = []
    for row in rows:
        for name, figures in [*row["requests"].items()][: 1 if brief else None]:
            latency, user = figures["latency"], figures["user_tokens_per_second"]
            cells.append(
                [
                    row["method"],
                    "" if brief else name,
                    str(figures["requests"]),
                    _number("{:.2f}", figures["mean_accepted_tokens"]),
                    _number("{:.2f}x", figures["walltime_speedup"]),
                    _number("{:.2f}x", figures["slowest"]["total"]),
                    _number("{:.2f}x", figures["throughput_speedup"]),
                    *(f"{1000 * latency[f'p{p}']:.1f}" for p in PERCENTILES),
                    _number("{:.1f}", figures["output_tokens_per_second"]),
                    _number("{:.1f}", user and user["mean"]),
                    f"{figures['equal']}/{figures['compared']}" if figures["compared"] else "",
                ]
            )
    return _kept([*REQUEST_COLUMNS], cells)


def _number(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _table(rows: Sequence[Figures], brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header and cells, without columns that are empty."""
    cells = [_cells(row, brief) for row in rows]
    *header, last = COLUMNS
    return _kept([*header, next(iter(rows[0].get("score", {})), last) if brief else last], cells)


def _cells(row: Figures, brief: bool = False) -> list[str]:
    """Cells of a row under ``COLUMNS``; if ``brief``, without intervals, secondary scores and names of scores."""
    scores = [f"{value:.3g}" if brief else f"{name} {value:.3g}" for name, value in row.get("score", {}).items()]
    return [
        row["method"] + ("" if row.get("lossless", True) else " (not lossless)"),
        f"{row['acceptance']['mean_acceptance_length']:.2f}" if row["acceptance"] else "",
        _longer(row["acceptance_difference"], brief),
        f"{cost:.2f}" if (cost := row.get("draft_cost")) else "",
        _ratio(row["end_to_end"], brief),
        _ratio(row["end_to_end_llama"], brief),
        _ratio(row["decoding"], brief),
        "" if row["baseline"] == PLAIN else _ratio(row["decoding_plain"], brief),
        f"{row['tokens_per_second']:.1f}",
        f"{1000 * row['time_to_first_token']:.1f}",
        "" if row["memory"] is None else f"{row['memory'] / 2**20:.0f}",
        f"{row['equal']}/{row['compared']}" if row["compared"] else "",
        ", ".join(scores[: 1 if brief else None]),
    ]


def _by_condition(rows: Sequence[Figures]) -> Iterator[tuple[str, list[Figures]]]:
    """A title and the rows of each task, temperature and batch size."""
    for key in dict.fromkeys((row["task"], row["temperature"], row["batch"]) for row in rows):
        group = [row for row in rows if (row["task"], row["temperature"], row["batch"]) == key]
        yield f"{key[0]}, temperature {key[1]:g}, batch {key[2]}", group


def brief_tables(rows: Sequence[Figures], width: int) -> Iterator[Table]:
    """Tables of methods and requests per task, temperature and batch size, split to fit a terminal of ``width``
    characters."""
    for title, group in _by_condition(rows):
        for name, (header, cells) in {
            title: _table(group, brief=True),
            f"{title}, by request": _request_table(group, brief=True),
        }.items():
            parts = (*zip(*cells, strict=True),)
            widths = [max(map(len, (*head.split(), *part))) for head, part in zip(header, parts, strict=True)]
            for columns in _fitting(widths, width):
                table = Table(title=name, caption=_copy_oracle(group) if name == title and 1 in columns else None)
                for column in columns:
                    table.add_column(header[column], width=min(widths[column], width // 2), overflow="fold")
                for line in cells:
                    table.add_row(*(line[column] for column in columns))
                yield table


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
    for name, text in {**COLUMNS, **REQUEST_COLUMNS}.items():
        names.setdefault(text.format(baseline=rows[0]["baseline"]), []).extend({name} & {*shown})
    return [f"{', '.join(each)}: {text}" for text, each in names.items() if each]


def _ratio(ratio: dict[str, float] | None, brief: bool) -> str:
    if ratio is None:
        return ""
    return f"{ratio['median']:.2f}x" + ("" if brief else f" ({ratio['low']:.2f} to {ratio['high']:.2f})")


def _copy_oracle(rows: Sequence[Figures]) -> str:
    """Upper bound of copying drafters in a line; empty if it was not measured."""
    for found in filter(None, (row.get("copy_oracle") for row in rows)):
        lengths = ", ".join(f"{found['tokens_per_step'][most]:.2f}" for most in ("8", "16", "32"))
        speedup = f"at best {found['speedup']:.2f}x none, with {_count(found['draft_tokens'], 'token')} a draft"
        return f"copy oracle: {lengths} tokens per step with drafts of up to 8, 16, 32 tokens; {speedup}"
    return ""


def _longer(change: dict[str, Any] | None, brief: bool) -> str:
    if change is None:
        return ""
    return f"{change['difference']:+.2f}" + ("" if brief else f" ({change['low']:+.2f} to {change['high']:+.2f})")


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
    try:
        from mmspec.eval.suite.plots import draw_all
    except ImportError:
        return [f"No plots: they need the package matplotlib; run {install('eval')}.", ""]
    drawn = draw_all(rows, folder / "plots")
    conditions = list(dict.fromkeys((row["temperature"], row["batch"]) for row in rows))
    which = []
    if len(conditions) > 1:
        which = [f"The plots show temperature {conditions[0][0]:g}, batch {conditions[0][1]}.", ""]
    return which + [line for title, name in drawn.items() for line in (f"![{title}](plots/{name})", "")]


def _differences(rows: Sequence[Figures]) -> list[str]:
    differences = [(row, difference) for row in rows if "score" in row for difference in row["differences"]]
    if not differences:
        return []
    lines = [
        "## Answers that differ",
        "",
        "The logit margin is the target's highest logit at the first difference minus the lower of the two tokens'",
        "logits: near zero where rounding decides. It is not computed for sampled answers.",
        "",
        "| method | temperature | batch | sample | token | logit margin |",
        "|---|---|---|---|---|---|",
    ]
    for row, difference in differences:
        margin = "" if difference["margin"] is None else f"{difference['margin']:.3g}"
        where = f"{difference['task']} {difference['id']}, turn {difference['turn']}"
        cell = f"{row['temperature']:g} | {row['batch']}"
        lines.append(f"| `{row['method']}` | {cell} | {where} | {difference['position']} | {margin} |")
    return [*lines, ""]
