"""Times of passes and of prefill by the length of the prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter as clock
from typing import Any

from mmspec.eval.decoding.passes import start, verify_pass
from mmspec.eval.harness.output import Column
from mmspec.targets.transformers_target import TransformersTarget

TREE = 8
"""Nodes of the larger pass."""

_PASSES = 5  # of each size after a prefill, of which the fastest counts


def measure_prefixes(
    targets: Mapping[str, TransformersTarget], prefixes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Rows of the table, one per target and length: medians over the rounds, ratios to the first length's."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(rounds + 1):  # the first is not measured
        for prefix in prefixes:
            for form, target in targets.items():
                found.setdefault((form, prefix), []).append(seconds_after(target, prefix))
    rows: list[dict[str, Any]] = []
    for (form, prefix), rounds_of in found.items():
        one, tree, prefill = (median(row[name] for row in rounds_of[1:]) for name in ("one", "tree", "prefill"))
        row: dict[str, Any] = {"form": form, "prefix": prefix, "milliseconds": 1000 * one, "tree": 1000 * tree}
        row |= {"passes": tree / one, "prefill": prefix / prefill}
        first = next((other for other in rows if other["form"] == form), row)
        row["speed"] = first["milliseconds"] / row["milliseconds"]
        row["prefill_speed"] = row["prefill"] / first["prefill"]
        rows.append(row)
    return rows


def seconds_after(target: TransformersTarget, prefix: int) -> dict[str, float]:
    """Seconds of a prefill of so many tokens (``prefill``), then of passes over one node (``one``) and ``TREE``."""
    begun = clock()
    start(target, prefix, max_new_tokens=TREE)
    seconds = {"prefill": clock() - begun}
    for name, nodes in (("one", 1), ("tree", TREE)):
        run = verify_pass(target, nodes)
        seconds[name] = min(run() for _ in range(_PASSES))
    target.select([])
    return seconds


PREFIX_COLUMNS: list[Column] = [
    ("weights", "{form}"),
    ("prefix", "{prefix}"),
    ("1 node, ms", "{milliseconds:.1f}"),
    ("speed", "{speed:.2f}"),
    (f"{TREE} nodes, ms", "{tree:.1f}"),
    ("in passes", "{passes:.2f}"),
    ("prefill, tokens/s", "{prefill:.0f}"),
    ("prefill speed", "{prefill_speed:.2f}"),
]
