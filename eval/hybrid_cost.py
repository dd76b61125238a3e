"""Cost of a decode step over a tree on larger hybrid models: ``python -m mmspec.eval hybrid_cost``.

The models have random weights. What is timed is described in ``mmspec.eval.decoding.step_cost``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch

from mmspec.cli.options import OUT_FILE
from mmspec.engine.calibrate import describe
from mmspec.eval.decoding.step_cost import PATH, SHAPES, measure_steps, shape_model, step_table
from mmspec.eval.harness.options import SIZES
from mmspec.eval.harness.output import BenchmarkCommand, print_result, wide_console
from mmspec.targets.transformers_target import TransformersTarget


def _merge_runs(run: dict[str, Any], out: Path | None) -> list[dict[str, Any]]:
    """The runs already in the file, with this one's rows added or replacing rows of the same key."""
    runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out is not None and out.exists() else []
    rows = {_row_key(row): row for row in run["rows"]}
    others = []
    for old in runs:
        if (old["shape"], old["dtype"]) == (run["shape"], run["dtype"]):
            rows = {_row_key(row): row for row in old["rows"]} | rows
        else:
            others.append(old)
    return [*others, {**run, "rows": [rows[key] for key in sorted(rows)]}]


def _row_key(row: dict[str, Any]) -> tuple[int, ...]:
    return row["prefix"], row["threads"], row["nodes"]


@click.command(cls=BenchmarkCommand)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="120M", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--threads", type=SIZES, default="1,2", show_default=True)
@click.option("--prefixes", type=SIZES, default="128,512,1024,4096", show_default=True)
@click.option("--nodes", type=SIZES, default="4,8,16,32,64", show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option(
    "--out",
    type=OUT_FILE,
    help="Also write the JSON result to this file, merged with its rows of other shapes, dtypes, prefixes and threads.",
)
def main(shape: str, dtype: str, rounds: int, out: Path | None, **sizes: tuple[int, ...]) -> None:
    """Time steps over trees on a hybrid model with random weights: a table, then one JSON line."""
    model = shape_model(shape, getattr(torch, dtype))
    rows = measure_steps(model, rounds, **sizes)
    wide_console().print(step_table(shape, dtype, rows))
    about = {key: value for key, value in describe(TransformersTarget(model)).items() if key != "threads"}
    run = {**about, "shape": shape, "parameters": model.num_parameters(), "path": PATH, "rounds": rounds, "rows": rows}
    print_result({"runs": _merge_runs(run, out)}, out)


if __name__ == "__main__":
    main()
