"""GPU benchmark: ``python -m mmspec.eval gpu --out FILE.json`` starts nothing new after eight minutes.

Nothing is downloaded. The most important parts come first: memory bandwidth; 7B and 8B models built on the device,
with single passes and whole answers at batch size 1 (``mmspec.eval.kernels.gpu_models``); every kernel against its
memory floor and against what transformers uses (``mmspec.eval.kernels.gpu_kernels``); a 13B model; larger batches.

The file is written after every row, and a later call with the same file resumes. A part that fails is recorded, and the
others still run, unless the failure left the device unusable.

``--quick --device cpu`` runs the same on tiny shapes, as a rehearsal; its times mean nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

from mmspec.cli.options import OUT_FILE
from mmspec.errors import UserError
from mmspec.eval.harness.output import BenchmarkCommand, print_result
from mmspec.eval.kernels.gpu_benchmark import FULL, QUICK, GpuBenchmark
from mmspec.eval.kernels.gpu_parts import describe_machine, finished_parts, run_parts

CAVEAT = "models are small trained ones in these shapes: acceptance is the small model's, time is the big shape's"


@click.command(cls=BenchmarkCommand)
@click.option("--out", type=OUT_FILE, help="Write the JSON result to this file after every row.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--minutes", default=8.0, show_default=True, help="Start nothing new after this time.")
@click.option("--quick", is_flag=True, help="Tiny shapes, as a rehearsal.")
@click.option("--skip", multiple=True, metavar="PART", help="Leave a part out; may be repeated.")
@torch.inference_mode()
def main(out: Path | None, device: str, minutes: float, quick: bool, skip: tuple[str, ...]) -> None:
    """Measure a GPU: a table for each part, then one JSON line."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("expected a CUDA device, found none (--device cpu --quick rehearses without one)")
    if where.type != "cuda" and not quick:
        raise UserError(f"real shapes need a CUDA device: got {device!r} (--quick takes tiny ones)")
    benchmark = GpuBenchmark(QUICK if quick else FULL, where, 60 * minutes, quick)
    content: dict[str, Any] = {"caveat": CAVEAT, **describe_machine(where), "quick": quick, "parts": {}}
    content["parts"] = finished_parts(out, content, skip)
    if known := content["parts"].get("memory"):
        benchmark.bandwidth = 1e9 * known["rows"][0]["copy_gb_per_second"]
    run_parts(benchmark.parts(), content, out, where, skip)
    print_result(content, out)
    if failed := failures(content):
        raise click.ClickException(f"failed: {', '.join(failed)}")


def failures(content: dict[str, Any]) -> list[str]:
    """Names of the parts that failed."""
    return [name for name, part in content["parts"].items() if "error" in part]
