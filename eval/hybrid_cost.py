"""Cost of a decode step over a tree on larger hybrid models: ``python -m mmspec.eval hybrid_cost``.

The models have random weights. What is timed is described in ``mmspec.eval.decoding.step_cost``.
"""

from __future__ import annotations

from typing import Any

import click
import torch

from mmspec.engine.calibrate import describe
from mmspec.eval.decoding.step_cost import PATH, SHAPES, measure_steps, shape_model, step_table
from mmspec.eval.harness.options import SIZES
from mmspec.eval.harness.output import benchmark, wide_console
from mmspec.targets.transformers_target import TransformersTarget


@benchmark
@click.option("--shape", type=click.Choice(list(SHAPES)), default="120M", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--threads", type=SIZES, default="1,2", show_default=True)
@click.option("--prefixes", type=SIZES, default="128,512,1024,4096", show_default=True)
@click.option("--nodes", type=SIZES, default="4,8,16,32,64", show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(shape: str, dtype: str, rounds: int, **sizes: tuple[int, ...]) -> dict[str, Any]:
    """Time steps over trees on a hybrid model with random weights: a table, then one JSON line."""
    model = shape_model(shape, getattr(torch, dtype))
    rows = measure_steps(model, rounds, **sizes)
    wide_console().print(step_table(shape, dtype, rows))
    about = {key: value for key, value in describe(TransformersTarget(model)).items() if key != "threads"}
    return {**about, "shape": shape, "parameters": model.num_parameters(), "path": PATH, "rounds": rounds, "rows": rows}
