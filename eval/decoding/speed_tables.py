"""Tables of decoding speed: speedups, and where a request's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from mmspec.eval.harness.output import Column, make_table, milliseconds
from mmspec.eval.harness.timing import PHASES, PLAIN, TRANSFORMERS, Method, time_ratios


def print_speed_tables(methods: Sequence[Method], console: Console) -> list[dict[str, Any]]:
    """Print speedups and time breakdown of measured methods.

    Args:
        methods: with plain decoding among them; transformers' ``generate`` is optional.

    Returns:
        One row of figures per method. Ratios are of seconds per token by prompt, then their median and minimum.
    """
    by_name = {method.name: method for method in methods}
    rows = [_speed_row(method, by_name[PLAIN], by_name.get(TRANSFORMERS)) for method in methods]
    columns: list[Column] = [
        ("method", "{method}"),
        ("acceptance", "{mean_acceptance_length:.2f}"),
        ("vs HF", "{ratio_transformers:.2f}"),
        ("vs plain", "{ratio_plain:.2f}"),
        ("worst", "{ratio_plain_worst:.2f}"),
        ("decoding", "{decoding_ratio_plain:.2f}"),
        ("worst", "{decoding_ratio_plain_worst:.2f}"),
        ("equal", "{equal}/{prompts}"),
    ]
    console.print(make_table(columns, rows))
    columns = [
        ("method", "{method}"),
        *((phase, _share(phase)) for phase in (*PHASES, "rest")),
        ("ms per tree", milliseconds("tree_seconds")),
        ("tree in passes", "{tree_passes:.2f}"),
        ("verify in passes", "{pass_passes:.2f}"),
    ]
    title = "share of a request's time; cost of drafting and of verifying a tree in plain passes of the target"
    console.print(make_table(columns, [row for row in rows if "shares" in row], title=title))
    return rows


def _share(phase: str) -> Any:
    return lambda row: f"{100 * row['shares'][phase]:.0f} %"


def _speed_row(method: Method, plain: Method, transformers: Method | None) -> dict[str, Any]:
    total, decoding = time_ratios(plain, method, "total"), time_ratios(plain, method, "decoding")
    row = {
        "method": method.name,
        "mean_acceptance_length": statistics.mean(method.lengths),
        "ratio_transformers": statistics.median(time_ratios(transformers, method, "total")) if transformers else None,
        "ratio_plain": statistics.median(total),
        "ratio_plain_worst": min(total),
        "decoding_ratio_plain": statistics.median(decoding) if decoding else None,
        "decoding_ratio_plain_worst": min(decoding, default=None),
        "equal": method.equal,
        "prompts": len(method.seconds),
    }
    return row | (time_breakdown(method, plain) if method is not transformers else {})


def time_breakdown(method: Method, plain: Method) -> dict[str, Any]:
    """Shares of a request's time, and the cost of a tree.

    Returns:
        ``shares`` of a request's total time by phase, means over the prompts; ``tree_seconds`` and ``pass_seconds``,
        medians of the time to draft a tree and to verify it; ``tree_passes`` and ``pass_passes``, the same divided by
        plain decoding's time per step, by prompt, then the median.
    """
    shares = {phase: statistics.mean(s[phase] / s["total"] for s in method.seconds) for phase in PHASES}
    shares["rest"] = 1.0 - sum(shares.values())
    costs: dict[str, float] = {}
    for name in ("tree", "pass"):
        # An adaptive method may have drafted no tree for some prompts.
        pairs = [(a, b) for a, b in zip(method.column(name), plain.column("pass"), strict=True) if a > 0.0]
        costs[f"{name}_seconds"] = statistics.median(a for a, _ in pairs) if pairs else 0.0
        costs[f"{name}_passes"] = statistics.median(a / b for a, b in pairs) if pairs else 0.0
    return {"shares": shares, **costs}
