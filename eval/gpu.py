"""GPU benchmark: ``python -m mmspec.eval gpu --out FILE.json``, at most ten minutes.

Nothing is downloaded. The most important parts come first: tokens of small models on the device, and on one of 7B
parameters that is built there, verify passes, drafts, whole answers and transformers' ``generate``; then kernels, and a
hybrid of 8B parameters (``mmspec.eval.kernels.gpu_models``, ``gpu_kernels``).

Each part runs in a process of its own (``mmspec.eval.kernels.gpu_parts``): a part that fails is recorded, and the
others still run. The file is written after every row, and a later call with the same file resumes.

``--quick --device cpu`` runs the same on tiny shapes, as a rehearsal; its times mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch
from rich.table import Table

from mmspec import plugins
from mmspec.checks import nearest
from mmspec.cli.options import OUT_FILE
from mmspec.errors import UserError
from mmspec.eval.harness.output import BenchmarkCommand, Column, make_table, print_result, wide_console, write_result
from mmspec.eval.kernels import gpu_kernels, gpu_models
from mmspec.eval.kernels.gpu_kernels import KernelTimer
from mmspec.eval.kernels.gpu_parts import (
    Row,
    Rows,
    describe_machine,
    failures,
    finished_parts,
    row_or_error,
    run_parts,
    write_rows,
)
from mmspec.eval.scale_up.models import SHAPES, Shape, shape_of
from mmspec.loading import load_target

MODEL, HYBRID = "7b", "8b-hybrid"
SOURCES = {MODEL: ("tiny-llava", "msd,flash"), HYBRID: ("tiny-hybrid", "flash,ngram")}
"""By preset of ``mmspec.eval.scale_up``: the embedded model that is scaled up to it, and its drafters."""


@dataclass(frozen=True)
class GpuPlan:
    """What the GPU benchmark measures.

    Attributes:
        batch: the batch size beside 1.
        prefix: prefix length of passes in tokens; ``long_prefix`` at batch size 1 of ``MODEL``, too.
        nodes: nodes of verify passes, root included.
        trees, chains: draft tokens per step of answers.
        vocab: vocabulary size of the kernels of sampling.
        new: new tokens per answer.
        groups: of prompts that are answered, at least; their steps are 64 or more together.
        calls: of passes and drafts in succession.
        lengths: new tokens of short and long answers of ``generate``.
    """

    batch: int = 8
    prefix: int = 1000
    long_prefix: int = 8000
    nodes: tuple[int, ...] = (1, 8, 16, 32, 64)
    trees: tuple[int, ...] = (15, 31, 59)
    chains: tuple[int, ...] = (3, 5, 8)
    vocab: int = 32064
    new: int = 128
    groups: int = 16
    calls: int = 64
    lengths: tuple[int, int] = (32, 96)


FULL = GpuPlan()
QUICK = GpuPlan(
    batch=2,
    prefix=20,
    long_prefix=40,
    nodes=(1, 4, 8),
    trees=(7,),
    chains=(3,),
    vocab=99,
    new=8,
    groups=1,
    calls=3,
    lengths=(2, 4),
)


class GpuBenchmark:
    """The parts of the GPU benchmark.

    Args:
        seconds: after which no part goes on.
        quick: use tiny shapes.
    """

    def __init__(self, plan: GpuPlan, device: torch.device, seconds: float, quick: bool) -> None:
        self.plan, self.device, self.quick = plan, device, quick
        self.deadline = clock() + seconds
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    @cached_property
    def bandwidth(self) -> float:
        return gpu_kernels.copy_bandwidth(self.device)

    @cached_property
    def timer(self) -> KernelTimer:
        return KernelTimer(self.device, self.bandwidth, self.dtype, 2 if self.quick else 32)

    def shape(self, preset: str) -> Shape:
        """The preset's shape, or the embedded model's own in a quick run."""
        if not self.quick:
            return SHAPES[preset]
        folder = str(plugins.find("models", SOURCES[preset][0])())
        return shape_of(load_target(folder, "cpu", "float32")[0].config)

    def parts(self) -> dict[str, tuple[float, Callable[[], Rows]]]:
        """Limit in seconds and rows of each part by name, in order."""
        return {
            "machine": (40, self.machine),
            "tokens": (90, self.tokens),
            f"passes {MODEL}": (120, partial(self.passes, MODEL)),
            f"answers {MODEL}": (200, partial(self.answers, MODEL)),
            f"generate {MODEL}": (200, self.generate),
            f"batch {MODEL}": (150, partial(self.answers, MODEL, self.plan.batch)),
            f"sampling {MODEL}": (120, partial(self.answers, MODEL, temperature=0.8, top_p=0.95)),
            "kernels": (120, self.kernels),
            f"passes {HYBRID}": (120, partial(self.passes, HYBRID)),
            f"answers {HYBRID}": (150, partial(self.answers, HYBRID)),
        }

    def machine(self) -> Rows:
        """The device, and the bandwidth of its memory."""
        yield {**describe_machine(self.device), "copy_gb_per_second": self.bandwidth / 1e9}

    def tokens(self) -> Rows:
        """Whether the embedded models say on the device what they say on a CPU."""
        for name, drafters in (
            ("tiny-llava", ("msd", "flash", "recycle", "ngram")),
            ("tiny-hybrid", ("flash", "mamba")),
        ):
            step = partial(gpu_models.check_tokens, name, drafters, self.device, 12 if self.quick else 48)
            yield from row_or_error(step, self.device, model=name)

    def _build(self, preset: str) -> gpu_models.ScaledModel:
        name, drafters = SOURCES[preset]
        return gpu_models.build_scaled_model(name, self.shape(preset), drafters, self.device, self.dtype)

    def passes(self, preset: str) -> Rows:
        """Verify passes, commits and drafts of a scaled-up model, EAGLE-3 and DFlash of random weights included."""
        plan, model = self.plan, self._build(preset)
        yield {"weight_gb": model.weight_bytes / 1e9, "build_seconds": model.build_seconds}
        model.drafters |= gpu_models.random_drafters(model.pipe.target)
        cases = [(1, plan.prefix), (plan.batch, plan.prefix)]
        if preset == MODEL:
            cases.append((1, plan.long_prefix))
        else:
            cases[1] = plan.batch, plan.prefix // 4  # transformers' prefill of these layers takes 4 GB per 1,000 tokens
        for batch, prefix in cases:
            step = partial(gpu_models.time_passes, model, batch, prefix, plan.nodes, self.bandwidth, plan.calls)
            yield from row_or_error(step, self.device, batch=batch, prefix=prefix)

    def answers(self, preset: str, batch: int = 1, **sampling: float) -> Rows:
        """Whole answers of a scaled-up model: plainly, with trees and with chains."""
        plan, model = self.plan, self._build(preset)
        fewer = bool(batch > 1 or sampling)
        trees, chains = (plan.trees[:2], plan.chains[:1]) if fewer else (plan.trees, plan.chains)
        requests = gpu_models.gpu_requests(preset == HYBRID, plan.groups * batch)
        groups = [requests[start : start + batch] for start in range(0, len(requests), batch)]
        methods = gpu_models.answer_methods(model, trees, chains, adaptive=not fewer)
        options = {"temperature": 0.0, **sampling, "max_new_tokens": plan.new}
        yield from gpu_models.time_answers(model, methods, groups, **options)

    def generate(self) -> Rows:
        """transformers' ``generate`` with a dynamic, a static and a compiled cache."""
        model = self._build(MODEL)
        for batch in (1, self.plan.batch):
            for mode in gpu_models.GENERATE_MODES:
                step = partial(gpu_models.time_generate, model, mode, batch, self.plan.lengths, 3)
                yield from row_or_error(step, self.device, method=f"generate {mode}", batch=batch)

    def kernels(self) -> Rows:
        """Every kernel against its memory floor."""
        plan, timer, largest = self.plan, self.timer, self.plan.nodes[-1]
        steps: list[Callable[[], Row | Rows]] = []
        for preset in (MODEL, HYBRID):
            for batch, prefix in ((1, plan.prefix), (1, plan.long_prefix), (plan.batch, plan.prefix)):
                for nodes in (1, largest):
                    steps.append(
                        partial(gpu_kernels.attention_row, timer, preset, self.shape(preset), batch, prefix, nodes)
                    )
        for batch in (1, plan.batch):
            steps += [
                partial(gpu_kernels.verification_rows, timer, batch, largest, plan.vocab),
                partial(gpu_kernels.growth_rows, timer, batch, plan.vocab),
                partial(gpu_kernels.compaction_row, timer, self.shape(MODEL), batch, largest),
            ]
            for name in ("small",) if self.quick else ("bamba", "nemotron"):
                steps += [partial(gpu_kernels.scan_rows, timer, name, batch, nodes) for nodes in (1, 16, largest)]
        for step in steps:
            yield from row_or_error(step, self.device, operation=step.func.__name__)  # type: ignore[attr-defined]


CAVEAT = "models are small trained ones in these shapes: acceptance is the small model's, time is the big shape's"

# ---------------------------------------------------------------------- tables


def part_table(name: str, part: Mapping[str, Any]) -> Table:
    """The rows of a part, a column per field; fields by nodes or by drafter have a column for each."""
    rows = [_flat(row) for row in part["rows"] if "where" not in row]
    fields = dict.fromkeys(field for row in rows for field in row)
    return make_table([(field.replace("_", " "), partial(_cell, field)) for field in fields], rows, title=name)


def _flat(row: Row) -> Row:
    fields: Row = {}
    for name, value in row.items():
        fields |= {f"{name} {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return fields


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row.get(name)
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(content: Mapping[str, Any]) -> Table:
    """Tokens per second at batch size 1: plain decoding, each drafter's best chain and best tree, and ``generate``."""
    parts = content["parts"]

    def rows(part: str) -> list[Row]:
        return [row for row in parts.get(part, {"rows": []})["rows"] if row.get("batch") == 1 and "where" not in row]

    answers, best = rows(f"answers {MODEL}"), {}
    for row in sorted(answers, key=lambda row: row["tokens_per_second"]):
        best[tuple(row["method"].split()[:2])] = row  # drafter and shape
    chosen = [*best.values(), *rows(f"generate {MODEL}")]
    chosen.sort(key=lambda row: row["tokens_per_second"])
    columns: list[Column] = [
        ("method", "{method}"),
        ("tokens/s", "{tokens_per_second:.1f}"),
        ("tokens/step", "{tokens_per_step:.2f}"),
        ("step, ms", "{step_ms:.2f}"),
    ]
    return make_table(columns, chosen, title=f"Tokens per second, {MODEL}, batch size 1")


# ---------------------------------------------------------------------- command


@click.command(cls=BenchmarkCommand)
@click.option("--out", type=OUT_FILE, help="Write the JSON result to this file after every row.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--minutes", default=10.0, show_default=True, help="End after this time.")
@click.option("--quick", is_flag=True, help="Tiny shapes, as a rehearsal.")
@click.option("--only", multiple=True, metavar="PART", help="Run this part; may be repeated.")
@click.option("--skip", multiple=True, metavar="PART", help="Leave a part out; may be repeated.")
@click.option("--rows", is_flag=True, hidden=True, help="Run one part in this process, and print its rows.")
@torch.inference_mode()
def main(
    out: Path | None, device: str, minutes: float, quick: bool, only: tuple[str, ...], skip: tuple[str, ...], rows: bool
) -> None:
    """Measure a GPU: a table for each part, then one JSON line."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("expected a CUDA device, found none (--device cpu --quick rehearses without one)")
    if where.type != "cuda" and not quick:
        raise UserError(f"real shapes need a CUDA device: got {device!r} (--quick takes tiny ones)")
    plan = QUICK if quick else FULL
    benchmark = GpuBenchmark(plan, where, 60 * minutes, quick)
    parts = benchmark.parts()
    for name in (*only, *skip):
        if name not in parts:
            raise UserError(
                f"unknown part: expected one of {', '.join(parts)}, got {name!r}{nearest(name, list(parts))}"
            )
    chosen = {name: limit for name, (limit, _) in parts.items() if name in (only or parts) and name not in skip}
    if rows:
        (name,) = chosen
        write_rows(parts[name][1]())
    content: dict[str, Any] = {"caveat": CAVEAT, **describe_machine(where), "quick": quick}
    content["parts"] = finished_parts(out, content)
    console = wide_console()

    def save() -> None:
        if out is not None:
            write_result(content, out)

    def report(name: str) -> None:
        part = content["parts"][name]
        console.print(part_table(name, part))
        state = part.get("skipped") or part.get("error", "done")
        click.echo(f"{name}: {state}, {part.get('seconds', 0.0):.0f} s", err=True)

    options = ["--device", device, *(["--quick"] if quick else [])]

    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "mmspec.eval", "gpu", *options, "--only", name, "--rows"]

    run_parts(chosen, content, command, benchmark.deadline, save, report)
    console.print(summary(content))
    print_result(content, out)
    if failed := failures(content):
        reasons = "; ".join(f"{name} ({why})" for name, why in failed.items())
        done = [name for name in content["parts"] if name not in failed]
        raise click.ClickException(f"failed: {reasons}. Measured: {', '.join(done) or 'none'}")
