"""GPU benchmark: ``python -m mmspec.eval gpu --out FILE.json`` starts nothing new after eight minutes.

Nothing is downloaded. The most important parts come first: memory bandwidth; 7B and 8B models built on the device,
with single passes and whole answers at batch size 1 (``mmspec.eval.kernels.gpu_models``); every kernel against its
memory floor and against what transformers uses (``mmspec.eval.kernels.gpu_kernels``); a 13B model; larger batches.

The file is written after every row, and a later call with the same file resumes. A part that fails is recorded, and the
others still run, unless the failure left the device unusable.

``--quick --device cpu`` runs the same on tiny shapes, as a rehearsal; its times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch

from mmspec import plugins
from mmspec.cli.options import OUT_FILE
from mmspec.errors import UserError
from mmspec.eval.harness.output import BenchmarkCommand, print_result
from mmspec.eval.kernels import gpu_kernels, gpu_models
from mmspec.eval.kernels.gpu_kernels import KernelTimer
from mmspec.eval.kernels.gpu_parts import Rows, describe_machine, finished_parts, rows_or_error, run_parts
from mmspec.eval.scale_up.axes import SHAPES, Shape
from mmspec.eval.scale_up.models import shape_of
from mmspec.loading import load_target

_MODEL_SECONDS = 40.0  # least time left to start a model with
_MEMORY_SHARE = 0.95  # of the device's memory that a prompt may need


@dataclass(frozen=True)
class GpuPlan:
    """What the GPU benchmark measures.

    Attributes:
        shapes: embedded model and its drafters, for each preset of ``mmspec.eval.scale_up``.
        batches: batch sizes; those after the first are measured at the first prefix and tree size only.
        prefixes: prefix lengths in tokens.
        nodes: nodes of verify passes and kernels, root included; answers are decoded with one draft token less.
        vocab: vocabulary size of the kernels of sampling.
        new, rounds: new tokens per answer, and rounds at the first batch size.
    """

    shapes: dict[str, tuple[str, str]]
    batches: tuple[int, ...] = (1, 4, 16)
    prefixes: tuple[int, ...] = (1000, 8000)
    nodes: tuple[int, ...] = (16, 32, 64)
    vocab: int = 32064
    new: int = 128
    rounds: int = 2


_VISION = "msd,flash"
FULL = GpuPlan(
    {
        "7b": ("tiny-llava", _VISION),
        "8b-hybrid": ("tiny-hybrid", "flash,ngram"),
        "13b": ("tiny-llava", _VISION),
    }
)
QUICK = GpuPlan(
    {"7b": ("tiny-llava", _VISION)},
    batches=(1, 2),
    prefixes=(20,),
    nodes=(4, 8),
    vocab=99,
    new=6,
    rounds=1,
)


class GpuBenchmark:
    """One run of the GPU benchmark.

    Args:
        seconds: after so long, nothing new is started.
        quick: use tiny shapes.
    """

    def __init__(self, plan: GpuPlan, device: torch.device, seconds: float, quick: bool) -> None:
        self.plan, self.device, self.quick = plan, device, quick
        self.deadline = clock() + seconds
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.bandwidth = 0.0

    @property
    def seconds_left(self) -> float:
        return self.deadline - clock()

    @property
    def timer(self) -> KernelTimer:
        return KernelTimer(self.device, self.bandwidth, self.dtype)

    def shape(self, preset: str) -> Shape:
        """The preset's shape, or the embedded model's own in a quick run."""
        if not self.quick:
            return SHAPES[preset]
        folder = str(plugins.find("models", self.plan.shapes[preset][0])())
        return shape_of(load_target(folder, "cpu", "float32")[0].config)

    def parts(self) -> dict[str, Callable[[], Rows]]:
        """All parts by name, in order."""
        single, *more = self.plan.batches
        *first, last = [(f"model {preset}", partial(self.model, preset, (single,))) for preset in self.plan.shapes]
        return {
            "memory": self.memory,
            **dict(first),
            "attention": self.attention,
            "verification": self.verification,
            "growing": self.growing,
            "compaction": self.compaction,
            "scans": self.scans,
            **dict([last]),
            **{f"batches {preset}": partial(self.model, preset, tuple(more)) for preset in self.plan.shapes},
        }

    def memory(self) -> Rows:
        """Bandwidth of the device's memory."""
        self.bandwidth = gpu_kernels.copy_bandwidth(self.device)
        yield {"copy_gb_per_second": self.bandwidth / 1e9}

    def attention(self) -> Rows:
        plan = self.plan
        for preset in plan.shapes:
            shape = self.shape(preset)
            for batch in (plan.batches[0], plan.batches[-1]) if preset == "7b" else plan.batches[:1]:
                for prefix in plan.prefixes:
                    for nodes in (1, plan.nodes[-1]) if batch == 1 else plan.nodes[-1:]:
                        if batch * prefix <= 20_000:
                            yield {
                                "shape": preset,
                                **gpu_kernels.time_attention(self.timer, shape, batch, prefix, nodes),
                            }

    def verification(self) -> Rows:
        for batch in (self.plan.batches[0], self.plan.batches[-1]):
            yield from gpu_kernels.time_verification(self.timer, batch, self.plan.nodes[-1], self.plan.vocab)

    def growing(self) -> Rows:
        for batch in (self.plan.batches[0], self.plan.batches[-1]):
            yield from gpu_kernels.time_growth(self.timer, batch, self.plan.vocab)

    def compaction(self) -> Rows:
        shape = self.shape("7b")
        for batch in self.plan.batches:
            yield gpu_kernels.time_compaction(self.timer, shape, batch, self.plan.nodes[-1], 1024)

    def scans(self) -> Rows:
        """Mamba-2 tree operations."""
        for name in ("small",) if self.quick else ("bamba", "nemotron"):
            for nodes in (1, *self.plan.nodes):
                yield from gpu_kernels.time_scans(self.timer, name, 1, nodes)

    def model(self, preset: str, batches: tuple[int, ...]) -> Rows:
        """Verify passes, calibration and whole answers of a scaled-up model."""
        name, drafters = self.plan.shapes[preset]
        if self.seconds_left < _MODEL_SECONDS:
            raise TimeoutError(f"{self.seconds_left:.0f} s are left: a model needs {_MODEL_SECONDS:.0f}")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        model = gpu_models.build_scaled_model(name, self.shape(preset), drafters, self.device, self.dtype)
        parameters = model.pipe.model.num_parameters()
        yield {"parameters": parameters, "weight_bytes": model.weight_bytes, "build_seconds": model.build_seconds}
        for step in self._model_steps(model, self.shape(preset), batches):
            if self.seconds_left > 0:
                yield from rows_or_error(step, self.device)
        if self.device.type == "cuda":
            yield {"most_memory_bytes": torch.cuda.max_memory_allocated(self.device)}

    def _model_steps(
        self, model: gpu_models.ScaledModel, shape: Shape, batches: tuple[int, ...]
    ) -> list[Callable[[], Rows]]:
        plan, hybrid, first = self.plan, shape.mamba is not None, batches == self.plan.batches[:1]
        prefixes, nodes = (plan.prefixes, plan.nodes) if first else (plan.prefixes[:1], plan.nodes[:1])
        rounds, sizes = plan.rounds if first else 1, tuple(n - 1 for n in nodes)
        steps: list[Callable[[], Rows]] = []
        for batch in batches:
            steps += [partial(self._passes, model, shape, batch, prefix, nodes) for prefix in prefixes]
        steps.append(partial(gpu_models.calibrate, model, refresh=first))
        for batch in batches:
            steps.append(partial(gpu_models.time_answers, model, batch, sizes, plan.new, rounds, hybrid))
        return steps

    def _passes(
        self, model: gpu_models.ScaledModel, shape: Shape, batch: int, prefix: int, nodes: tuple[int, ...]
    ) -> Rows:
        if self.device.type == "cuda":
            needed, total = gpu_models.needed_bytes(shape, batch, prefix), torch.cuda.mem_get_info(self.device)[1]
            if needed > _MEMORY_SHARE * total:
                raise MemoryError(f"batch {batch} at prefix {prefix} needs {needed / 1e9:.0f} of {total / 1e9:.0f} GB")
        yield gpu_models.time_passes(model, batch, prefix, nodes, self.bandwidth)


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
    return [name for name, part in content["parts"].items() if "error" in part]
