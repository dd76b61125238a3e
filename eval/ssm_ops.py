"""Micro-benchmark of the Mamba-2 tree scan, convolution and commit: ``python -m mmspec.eval ssm_ops``.

``mmspec.eval.kernels.mamba2`` describes what is timed.
"""

from __future__ import annotations

from typing import Any

import click
import torch

from mmspec.eval.harness.options import SIZES, CommaList
from mmspec.eval.harness.output import benchmark, wide_console
from mmspec.eval.kernels.mamba2 import SHAPES, Mamba2Layer, layer_table, measure_layers
from mmspec.ops import kernels


@benchmark
@click.option("--shapes", type=CommaList(click.Choice(list(SHAPES))), default=",".join(SHAPES), show_default=True)
@click.option("--nodes", type=SIZES, default="4,16,64", show_default=True, help="Tree sizes, in addition to 1.")
@click.option("--batch", default=1, show_default=True)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--device", default="cpu", show_default=True)
@click.option("--rounds", default=50, show_default=True)
@torch.inference_mode()
def main(
    shapes: tuple[str, ...],
    nodes: tuple[int, ...],
    batch: int,
    dtype: str,
    device: str,
    rounds: int,
) -> dict[str, Any]:
    """Time the operations of a Mamba-2 layer over trees: a table, then one JSON line."""
    sizes = dict.fromkeys((1, *nodes))
    rows = []
    for name in shapes:
        layers = [Mamba2Layer(batch, size, getattr(torch, dtype), device, SHAPES[name]) for size in sizes]
        rows += [{"shape": name, **row} for row in measure_layers(layers, rounds, device)]
    wide_console().print(layer_table(rows))
    facts = {"batch": batch, "dtype": dtype, "device": device, "kernels": kernels.in_use(torch.device(device))}
    return {**facts, "threads": torch.get_num_threads(), "rounds": rounds, "rows": rows}


if __name__ == "__main__":
    main()
