"""Token-by-token comparison of speculative output with plain decoding: ``python -m mmspec.eval losslessness``.

``tests.tiny.cases`` describes the grid of cases.
"""

from __future__ import annotations

import itertools
import json
from time import perf_counter as clock

import click

from mmspec.eval.harness.output import BenchmarkCommand
from tests.tiny.cases import compare_cases, select_cases
from tests.tiny.configs import VOCAB


@click.command(cls=BenchmarkCommand)
@click.option("--cases", type=click.IntRange(1), help="Compare this many cases instead of all.")
@click.option("--new-tokens", default=24, show_default=True, help="Tokens per output.")
@click.option("--json", "json_only", is_flag=True, help="Print the JSON line only.")
def main(cases: int | None, new_tokens: int, json_only: bool) -> None:
    """Print one line per model and every unequal case, then one JSON line."""
    start = clock()
    results = []
    compared = compare_cases(select_cases(cases), new_tokens)
    for name, group in itertools.groupby(compared, key=lambda result: result[0].model):
        done = list(group)
        results += done
        if not json_only:
            equal = sum(difference is None for _, difference in done)
            click.echo(f"{name:20} {equal:4} of {len(done):4} equal")
    unequal = [difference for _, difference in results if difference is not None]
    if not json_only:
        for d in unequal:
            click.echo(f"unequal: {d.case}, row {d.row}, new token {d.position}, margin {d.margin:.2e}")
    figures = {
        "cases": len(results),
        "equal": len(results) - len(unequal),
        "unequal": [{**vars(d.case), "row": d.row, "position": d.position, "margin": d.margin} for d in unequal],
        "dtype": "float32",
        "new_tokens": new_tokens,
        "vocab": VOCAB,
        "seconds": round(clock() - start, 1),
    }
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
