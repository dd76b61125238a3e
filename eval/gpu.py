"""All that is to be known of a GPU, in one command: ``python -m eval.gpu --out FILE.json`` begins nothing new after
eight minutes.

Nothing is downloaded. What matters most comes first: the bandwidth of the memory; models of 7 and 8 billion parameters
made on the device, single passes and whole answers of one row (`gpu_models`); every kernel against its floor and
against what transformers uses (`gpu_kernels`); 13 billion parameters; the tests that need a GPU; larger batches;
and flex attention, which takes long to compile.

The file is written whole after every row, and a later call with the same file goes on behind it. A part that fails is
recorded, and the others still run, in a new process if it has left the device unusable.

``--quick --device cpu`` runs the same on tiny shapes, to try the flow; its times mean nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch

from eval.harness.command import Measurement, print_result
from eval.kernels import gpu_kernels, gpu_models
from eval.kernels.gpu_kernels import Place
from eval.kernels.gpu_run import Rows, attempt, earlier, machine, run
from eval.scale_up.axes import SHAPES, Shape
from eval.scale_up.models import shape_of
from mmspec import plugins
from mmspec.cli.options import OUT_FILE
from mmspec.errors import UserError
from mmspec.loading import load_target

ROOT = Path(__file__).parent.parent
CAVEAT = "models are small trained ones in these shapes: acceptance is the small model's, time is the big shape's"
_TESTS_SECONDS = 120.0
_TEST_PROCESSES = 8
_LENIENT = ("-W", "default::UserWarning", "-W", "default::FutureWarning")  # what libraries say of a new device
_LAST_MODEL = 40.0  # a model is not begun with less time left
_MOST_MEMORY = 0.95  # of the device's, that a prompt may take


def marked(mark: str) -> list[str]:
    """Files of tests that have such: others may need packages that are not there."""
    return [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if f"mark.{mark}" in path.read_text()]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        shapes: by preset, the model's name and its drafters by label.
        batches, prefixes, nodes: of passes and kernels; ``nodes`` of whole answers are one less, the root left out.
            Batches beyond the first are measured with the first of the others.
        new, rounds: tokens of an answer, and how often one row's is decoded in every way.
        tests: arguments of pytest.
    """

    shapes: dict[str, tuple[str, dict[str, str]]]
    batches: tuple[int, ...] = (1, 4, 16)
    prefixes: tuple[int, ...] = (1000, 8000)
    nodes: tuple[int, ...] = (16, 32, 64)
    vocab: int = 32064
    new: int = 128
    rounds: int = 2
    tests: tuple[str, ...] = field(default_factory=lambda: (*_LENIENT, "-m", "gpu", *marked("gpu")))


_VISION = {"msd": "msd", "flash": "flash"}
FULL = Plan(
    {
        "7b": ("tiny-llava", _VISION),
        "8b-hybrid": ("tiny-hybrid", {"flash": "flash", "mamba": "mamba", "ngram": "ngram"}),
        "13b": ("tiny-llava", _VISION),
    }
)
QUICK = Plan(
    {"7b": ("tiny-llava", _VISION)},
    batches=(1, 2),
    prefixes=(20,),
    nodes=(4, 8),
    vocab=99,
    new=6,
    rounds=1,
    tests=("--version",),  # there is nothing to test them on
)


class Bench:
    """One run: its plan, its place and its clock."""

    def __init__(self, plan: Plan, device: torch.device, seconds: float, quick: bool) -> None:
        self.plan, self.device, self.quick = plan, device, quick
        self.ends = clock() + seconds
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.bandwidth = 0.0

    @property
    def left(self) -> float:
        return self.ends - clock()

    @property
    def place(self) -> Place:
        return Place(self.device, self.bandwidth, self.dtype)

    def shape(self, preset: str) -> Shape:
        """The preset's; small in a quick run."""
        if not self.quick:
            return SHAPES[preset]
        return shape_of(load_target(_folder(self.plan.shapes[preset][0]), "cpu", "float32").config)

    def parts(self) -> dict[str, Callable[[], Rows]]:
        """What is run, in order."""
        one, *more = self.plan.batches
        *sooner, later = [(f"model {preset}", partial(self.model, preset, (one,))) for preset in self.plan.shapes]
        kernels = {
            "attention": self.attention,
            "verification": self.verification,
            "growing": self.growing,
            "compaction": self.compaction,
            "scans": self.scans,
        }
        batches = {f"batches {preset}": partial(self.model, preset, tuple(more)) for preset in self.plan.shapes}
        first: dict[str, Callable[[], Rows]] = {"memory": self.memory, **dict(sooner), **kernels}
        return first | dict([later]) | {"tests": self.tests} | batches | {"flex": self.flex}

    def memory(self) -> Rows:
        self.bandwidth = gpu_kernels.bandwidth(self.device)
        yield {"copy_gb_per_second": self.bandwidth / 1e9}

    def tests(self) -> Rows:
        command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "--tb=short", *self.plan.tests]
        if self.device.type == "cuda" and find_spec("xdist") is not None:
            command += ["-n", str(_TEST_PROCESSES)]  # most of the time goes to compiling
        limit = max(1.0, min(_TESTS_SECONDS, self.left))
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            said, told = child.communicate(timeout=limit)
            status: int | str = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # those that it has started, too
            said, told = child.communicate()
            status = f"stopped after {limit:.0f} s"
        lines = said.strip().splitlines()
        # At the end of a summary; as they happen, where there is none.
        failed = [
            line
            for line in lines
            if line.startswith(("FAILED", "ERROR")) or (status not in (0, 1) and "FAILED" in line)
        ]
        passed = sum("PASSED" in line for line in lines)
        row = {"status": status, "passed": passed, "summary": lines[-1] if lines else told[-300:], "failed": failed}
        yield row if status == 0 else row | {"error": row["summary"]}

    def attention(self, flex: bool = False) -> Rows:
        plan = self.plan
        for preset in ("7b",) if flex else plan.shapes:
            shape = self.shape(preset)
            for batch in (plan.batches[0], plan.batches[-1]) if preset == "7b" and not flex else plan.batches[:1]:
                for prefix in plan.prefixes:
                    for nodes in (1, plan.nodes[-1]) if batch == 1 and not flex else plan.nodes[-1:]:
                        if batch * prefix <= 20_000 and not (flex and self.left < 0):
                            row = gpu_kernels.attention(self.place, shape, batch, prefix, nodes, flex)
                            yield {"shape": preset, **row}

    def flex(self) -> Rows:
        return self.attention(flex=True)

    def verification(self) -> Rows:
        for batch in (self.plan.batches[0], self.plan.batches[-1]):
            yield from gpu_kernels.verification(self.place, batch, self.plan.nodes[-1], self.plan.vocab)

    def growing(self) -> Rows:
        for batch in (self.plan.batches[0], self.plan.batches[-1]):
            yield from gpu_kernels.growing(self.place, batch, self.plan.vocab)

    def compaction(self) -> Rows:
        shape = self.shape("7b")
        for batch in self.plan.batches:
            yield gpu_kernels.compaction(self.place, shape, batch, self.plan.nodes[-1], 1024)

    def scans(self) -> Rows:
        for name in ("small",) if self.quick else ("bamba", "nemotron"):
            for nodes in (1, *self.plan.nodes):
                yield from gpu_kernels.scans(self.place, name, 1, nodes)

    def model(self, preset: str, batches: tuple[int, ...]) -> Rows:
        name, drafters = self.plan.shapes[preset]
        if self.left < _LAST_MODEL:
            raise TimeoutError(f"{self.left:.0f} s are left: a model takes {_LAST_MODEL:.0f}")
        shape, plan, alone = self.shape(preset), self.plan, batches == self.plan.batches[:1]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        big = gpu_models.build(name, shape, drafters, self.device, self.dtype)
        parameters = big.pipe.model.num_parameters()
        yield {"parameters": parameters, "weight_bytes": big.weight_bytes, "build_seconds": big.build_seconds}
        prefixes, nodes = (plan.prefixes, plan.nodes) if alone else (plan.prefixes[:1], plan.nodes[:1])
        steps: list[Callable[[], Rows]] = []
        for batch in batches:
            steps += [partial(self.passes, big, shape, batch, prefix, nodes) for prefix in prefixes]
        steps.append(partial(gpu_models.calibrate, big, refresh=alone))
        sizes, hybrid = tuple(n - 1 for n in nodes), shape.mamba is not None
        for batch in batches:
            rounds = plan.rounds if alone else 1
            steps.append(
                partial(gpu_models.decoding, big, batch, sizes, plan.new, rounds, hybrid, lambda: self.left < 0)
            )
        if alone:
            steps.append(partial(gpu_models.transformers_generate, big, plan.new, hybrid))
        for step in steps:
            if self.left > 0:
                yield from attempt(step, self.device)
        if self.device.type == "cuda":
            yield {"most_memory_bytes": torch.cuda.max_memory_allocated(self.device)}

    def passes(self, big: gpu_models.Big, shape: Shape, batch: int, prefix: int, nodes: tuple[int, ...]) -> Rows:
        if self.device.type == "cuda":
            takes, there = gpu_models.needed(shape, batch, prefix), torch.cuda.mem_get_info(self.device)[1]
            if takes > _MOST_MEMORY * there:
                raise MemoryError(f"batch {batch} behind {prefix} takes {takes / 1e9:.0f} GB of {there / 1e9:.0f}")
        yield gpu_models.passes(big, batch, prefix, nodes, self.bandwidth)


def _folder(model: str) -> str:
    return str(plugins.find("models", model)())


@click.command(cls=Measurement)
@click.option("--out", type=OUT_FILE, help="Write the JSON here, after every row.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--minutes", default=8.0, show_default=True, help="Begin nothing after so many.")
@click.option("--quick", is_flag=True, help="Tiny shapes, to try the flow.")
@click.option("--skip", multiple=True, metavar="PART", help="Leave a part out; may be given several times.")
@torch.inference_mode()
def main(out: Path | None, device: str, minutes: float, quick: bool, skip: tuple[str, ...]) -> None:
    """Measure a GPU: a table for each part, then one JSON line."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("expected a CUDA device, found none (--device cpu --quick tries the flow without one)")
    if where.type != "cuda" and not quick:
        raise UserError(f"real shapes need a CUDA device: got {device!r} (--quick takes tiny ones)")
    bench = Bench(QUICK if quick else FULL, where, 60 * minutes, quick)
    content: dict[str, Any] = {"caveat": CAVEAT, **machine(where), "quick": quick, "parts": {}}
    content["parts"] = earlier(out, content, skip)
    if known := content["parts"].get("memory"):
        bench.bandwidth = 1e9 * known["rows"][0]["copy_gb_per_second"]
    left = run(bench.parts(), content, out, where, skip)
    if left and out is not None:
        _go_on(out, device, bench.left / 60, [*skip, *failures(content)])
    print_result(content, out)
    if failed := failures(content):
        raise click.ClickException(f"failed: {', '.join(failed)}")


def failures(content: dict[str, Any]) -> list[str]:
    """Parts that failed."""
    return [name for name, part in content["parts"].items() if "error" in part]


def _go_on(out: Path, device: str, minutes: float, skip: list[str]) -> None:
    """The rest in a process that takes this one's place: in this one the device is lost."""
    options = ["--out", str(out), "--device", device, "--minutes", str(minutes)]
    sys.stdout.flush()
    os.execv(
        sys.executable, [sys.executable, "-m", "eval.gpu", *options, *(x for name in skip for x in ("--skip", name))]
    )


if __name__ == "__main__":
    main()
