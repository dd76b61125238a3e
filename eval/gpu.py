"""GPU benchmark: ``python -m mmspec.eval gpu --out FILE.json``, at most ten minutes.

Embedded models show whether tokens equal a CPU's. Everything else is timed on random weights in published shapes, with
drafters that run at their cost and drafts that are accepted at a set rate (``--acceptance``). Each part is a process of
its own, the most important parts first: a part that fails or hangs costs that part only. The file is written after
every part. ``--quick --device cpu`` rehearses on tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter as clock
from typing import Any

import click
import torch
import transformers
from rich.table import Table

import mmspec
from mmspec.cli.options import OUT_FILE
from mmspec.errors import UserError, first_line
from mmspec.eval.harness.output import (
    BenchmarkCommand,
    git_commit,
    make_table,
    print_result,
    wide_console,
    write_result,
)
from mmspec.eval.harness.prompts import held_out_requests
from mmspec.eval.harness.timing import (
    DecodingOptions,
    Method,
    TimedBatch,
    decode,
    peak_memory,
    reset_peak_memory,
)
from mmspec.eval.kernels import gpu_kernels, gpu_models
from mmspec.ops import graphs, kernels
from mmspec.pipeline import Pipeline

Row = dict[str, Any]
_ROW = "row: "  # begins a line of a part's output
GENERATE = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
GENERATE |= {"compiled": {"cache_implementation": "static"}}
"""Options of transformers' ``generate``; on a GPU, a static cache alone compiles the forward."""


@dataclass(frozen=True)
class Plan:
    """How to measure: ``acceptance`` is the probability that a draft is accepted after accepted drafts."""

    device: torch.device
    quick: bool
    acceptance: float

    def of(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.of((1, 8, 16, 32, 64), (1, 4, 8))

    def cases(self) -> list[tuple[int, int]]:
        """Batch sizes and prefixes."""
        return self.of([(1, 1000), (8, 1000), (1, 8000)], [(1, 20), (8, 20), (1, 40)])

    def target(self, name: str) -> Any:
        return gpu_models.random_target(gpu_models.config_of(name, self.quick), self.device, self.dtype)


def attempt(step: Callable[[], Row], **facts: Any) -> Iterator[Row]:
    """The row of a step, or one with its error (``failed``): the other steps still run."""
    try:
        yield {**facts, **step()}
    except Exception as error:
        traceback.print_exc()
        yield {**facts, "failed": f"{type(error).__name__}: {first_line(error)}"}


def machine(plan: Plan) -> Iterator[Row]:
    """The device, software versions, and the bandwidth of the device's memory."""
    has: Any = torch.cuda.get_device_properties(plan.device) if plan.device.type == "cuda" else None
    facts = {"device": has.name, "memory_gb": has.total_memory / 1e9} if has else {"device": platform.machine()}
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__, "commit": git_commit()}
    copied = gpu_kernels.copy_bandwidth(plan.device) / 1e9
    yield {**facts, "kernels": kernels.in_use(plan.device), "copy_gb_per_second": copied}


def tokens(plan: Plan) -> Iterator[Row]:
    """Whether answers of the embedded models in float32 on the device equal plain decoding on a CPU."""

    def check(name: str, requests: Any, drafter: str | None) -> Row:
        got: list[Any] = []
        runs = [(None, "cpu"), *[(drafter, plan.device.type)] * 3]  # on a GPU, the second captures, the third replays
        for spec, device in runs:
            if len(got) < 2:
                pipe = mmspec.load(name, drafter=spec, dtype="float32", device=device)
            results = pipe.generate_batch(requests, max_new_tokens=plan.of(48, 8), temperature=0.0, nodes=15)
            got.append([result.token_ids for result in results])
        assert got == got[:1] * 4, f"answers must be the CPU's: expected {got[0]}, got {got[1:]}"
        return {"equal": len(got[0])}

    llava = "tiny-llava", held_out_requests("images", 1) + held_out_requests("clips", 1)
    hybrid = "tiny-hybrid", held_out_requests("prompts", 2)
    both = *product([llava], (None, "msd", "flash", "recycle")), *product([hybrid], (None, "flash", "mamba"))
    for (name, requests), drafter in both:
        yield from attempt(partial(check, name, requests, drafter), model=name, drafter=drafter)


def passes(name: str, plan: Plan) -> Iterator[Row]:
    """Verify passes, commits and drafts."""
    target, bandwidth = plan.target(name), gpu_kernels.copy_bandwidth(plan.device)
    for batch, prefix in plan.cases():
        # transformers' prefill of Mamba-2 layers takes 4 GB per 1,000 tokens.
        prefix = prefix // 4 if name == "hybrid" and batch > 1 else prefix
        reset_peak_memory(plan.device)
        step = partial(gpu_models.time_passes, target, batch, prefix, plan.nodes, bandwidth, plan.of(64, 2))
        for row in attempt(step, batch=batch, prefix=prefix):
            yield {**row, "peak_bytes": peak_memory(plan.device)}


def answers(name: str, plan: Plan, batch: int = 1, peers: bool = False, **sampling: Any) -> Iterator[Row]:
    """Whole answers, plain and of each drafter with trees, chains and adaptive trees; or of ``generate`` (``peers``).

    Results are of decoding after the first token, medians over groups of prompts after a warm-up group.
    """
    target, few = plan.target(name), batch > 1 or bool(sampling)
    known: dict[Any, list[int]] = {}
    processor, vocab = gpu_models.number_processor(target.config.vocab_size), target.config.vocab_size
    drawn, options = Random(0), DecodingOptions(plan.of(256, 8), seed=1, **sampling)
    length, new = plan.of(640, 12), options.max_new_tokens - 1  # a picture of LLaVA-1.5 and a question
    groups = [[{"prompt": drawn.choices(range(10, 150), k=length)} for _ in range(batch)] for _ in range(4)]

    def time(method: Method) -> Row:
        pipe, timed = Pipeline(target, processor, method.drafter, max_num_seqs=batch), list[TimedBatch]()
        captured = equal = 0
        if method.generate_options is None:
            pipe.warm_up(batch, plan.of(1024, 64), [method.nodes])
        for turn, group in enumerate(groups):
            captured = graphs.num_captures() if turn == 1 else captured
            timed.append(decode(pipe, method, group, options))
            for request, answer in zip(group, timed[-1].answers, strict=True):
                equal += known.setdefault(tuple(request["prompt"]), answer) == answer
        stats = [[s for s in one.stats if s.wall_seconds] for one in timed[1:]]  # empty of generate
        steps = [max((s.num_spec_steps for s in rows), default=new) for rows in stats]
        spent = [[one.seconds.get(phase, 0.0) for one in timed[1:]] for phase in ("decoding", "draft", "verify")]
        step, draft, verify = (median(1000 * s / n for s, n in zip(phase, steps, strict=True)) for phase in spent)
        return {
            "steps": sum(steps),
            "tokens_per_step": fmean([s.mean_acceptance_length for rows in stats for s in rows] or [1.0]),
            **{"step_ms": step, "draft_ms": draft, "verify_ms": verify, "rest_ms": step - draft - verify},
            "tokens_per_second": batch * new / median(spent[0]),
            "equal": f"{equal}/{4 * batch}",
            "captures": graphs.num_captures() - captured,
            "peak_bytes": max(one.memory or 0 for one in timed),
        }

    for mode in GENERATE if peers else ():
        yield from attempt(partial(time, Method(mode, generate_options=GENERATE[mode])), method=mode, batch=batch)
    if peers:
        return
    yield from attempt(partial(time, Method("plain", max_num_seqs=batch)), method="plain", batch=batch)
    trees, chains = plan.of((31,) if few else (15, 31, 59), (7,)), plan.of((5,) if few else (3, 5, 8), (3,))
    shapes = *product(("tree",), trees), ("adaptive", None), *product(("chain",), chains)
    for (label, drafter), (kind, size) in product(gpu_models.random_drafters(target).items(), shapes):
        own = drafter.renewed(drafter.network)
        if kind == "chain":
            own.draft_chains(size)
        drafts = gpu_models.SetAcceptance(own, known, plan.acceptance, vocab)
        method = Method(f"{label} {kind} {size or ''}", drafts, size, max_num_seqs=batch)
        yield from attempt(partial(time, method), method=method.name, batch=batch, set_acceptance=plan.acceptance)


def kernel_times(plan: Plan) -> Iterator[Row]:
    """Every kernel against its memory floor."""
    device, dtype, bandwidth = plan.device, plan.dtype, gpu_kernels.copy_bandwidth(plan.device)
    for name, (batch, prefix), nodes in product(("7b", "hybrid"), plan.cases(), (1, plan.nodes[-1])):
        config = gpu_models.config_of(name, plan.quick)
        for kernel in gpu_kernels.kernels(config, batch, prefix, nodes, device, dtype.itemsize):
            step = partial(gpu_kernels.measure, kernel, device, dtype, bandwidth, plan.of(32, 2))
            yield from attempt(step, kernel=kernel[0], model=name, batch=batch, prefix=prefix, nodes=nodes)


PARTS: dict[str, tuple[float, Callable[[Plan], Iterator[Row]]]] = {
    "machine": (60, machine),
    "tokens": (90, tokens),
    "passes-7b": (120, partial(passes, "7b")),
    "answers-7b": (200, partial(answers, "7b")),
    "generate-7b": (150, partial(answers, "7b", peers=True)),
    "batch-7b": (120, partial(answers, "7b", batch=8)),
    "sampling-7b": (120, partial(answers, "7b", temperature=0.8, top_p=0.95)),
    "kernels": (120, kernel_times),
    "passes-hybrid": (120, partial(passes, "hybrid")),
    "answers-hybrid": (150, partial(answers, "hybrid")),
    "generate-batch-7b": (150, partial(answers, "7b", batch=8, peers=True)),
}
"""By name, in order: the limit in seconds, and the rows of a part."""


def run_part(command: list[str], seconds: float) -> Row:
    """Run a part's process: its ``rows``, and ``error`` with the end of its ``log`` if it failed."""
    try:
        # Errors of drafters and kernels are raised, in place of going on without.
        done = subprocess.run(command, capture_output=True, timeout=seconds, env={**os.environ, "MMSPEC_STRICT": "1"})
        out, log, error = done.stdout, done.stderr, f"exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        out, log, error = late.stdout or b"", late.stderr or b"", f"not finished after {seconds:.0f} s"
    part = {"rows": [json.loads(line[len(_ROW) :]) for line in out.decode().splitlines() if line.startswith(_ROW)]}
    return part | ({"error": error, "log": log.decode(errors="replace")[-4000:]} if error else {})


def part_command(name: str, plan: Plan) -> list[str]:
    """The command of a part's process."""
    options = ["--device", str(plan.device), "--acceptance", str(plan.acceptance), *["--quick"] * plan.quick]
    return [sys.executable, "-m", "mmspec.eval", "gpu", *options, "--only", name, "--rows"]


def part_table(name: str, part: Row) -> Table:
    """The rows of a part, a column per field."""
    fields = dict.fromkeys(field for row in part["rows"] for field in row)

    def cell(field: str, row: Any) -> str:
        value = row.get(field, "")
        if isinstance(value, dict):
            return ", ".join(f"{key}: {number:.4g}" for key, number in value.items())
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    note = "drafts are accepted at a set rate: acceptance is not measured" if "set_acceptance" in fields else None
    columns = [(field.replace("_", " "), partial(cell, field)) for field in fields]
    return make_table(columns, part["rows"], title=name, caption=note)


@click.command(cls=BenchmarkCommand)
@click.option("--out", type=OUT_FILE, help="Write the JSON result to this file after every part.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--minutes", default=10.0, show_default=True, help="End after this time.")
@click.option("--quick", is_flag=True, help="Tiny shapes, as a rehearsal.")
@click.option("--acceptance", type=click.FloatRange(0, 1, min_open=True), default=0.8, help="Set, per draft [0.8].")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Run this part; may be repeated.")
@click.option("--skip", multiple=True, type=click.Choice(list(PARTS)), help="Leave a part out; may be repeated.")
@click.option("--rows", is_flag=True, hidden=True, help="Run one part in this process, and print its rows.")
@torch.inference_mode()
def main(out: Path | None, device: str, minutes: float, only: Any, skip: Any, rows: bool, **settings: Any) -> None:
    """Measure a GPU: a table for each part, then one JSON line."""
    plan, deadline, failed = Plan(torch.device(device), **settings), clock() + 60 * minutes, False
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("expected a CUDA device, found none (--device cpu --quick rehearses without one)")
    if plan.device.type != "cuda" and not plan.quick:
        raise UserError(f"real shapes need a CUDA device: got {device!r} (--quick takes tiny ones)")
    if rows:
        for row in PARTS[only[0]][1](plan):
            failed |= "failed" in row
            print(_ROW + json.dumps(row), flush=True)
        click.echo(graphs.capture_failure() or "", err=True)
        sys.exit(failed or graphs.capture_failure() is not None)
    content: Row = {"acceptance": f"set to {plan.acceptance}, not measured", "quick": plan.quick, "parts": {}}
    for name in [name for name in PARTS if name in (only or PARTS) and name not in skip]:
        limit = min(PARTS[name][0], deadline - clock())
        part = run_part(part_command(name, plan), limit) if limit > 0 else {"rows": [], "error": "no time was left"}
        content["parts"][name] = part
        wide_console().print(part_table(name, part))
        click.echo(f"{name}: {part.get('error', 'done')}", err=True)
        if out is not None:
            write_result(content, out)
    print_result(content, out)
    sys.exit(any("error" in part for part in content["parts"].values()))
