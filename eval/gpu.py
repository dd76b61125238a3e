"""All that is to be known of a GPU, in one command and eight minutes: ``python -m eval.gpu --out FILE.json``.

Nothing is downloaded. In turn: what the machine is and the bandwidth of its memory; the tests that need a GPU; every
kernel against its floor and against what transformers uses (`eval.gpu_kernels`); models of 7, 13 and 8 billion
parameters made on the device, single passes and whole answers (`eval.gpu_models`). A part that fails is recorded, and
the others still run. The file is written whole after every part.

``--quick --device cpu`` runs the same on tiny shapes, to try the flow; its times mean nothing.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch
import transformers
from rich.table import Table

from eval import gpu_kernels, gpu_models
from eval.command import Measurement, commit, console, print_result, write_result
from eval.gpu_kernels import Place
from eval.scale_up import SHAPES, Shape
from eval.scale_up_models import shape_of
from mmspec import kernels, plugins
from mmspec.errors import UserError
from mmspec.loading import load_target

ROOT = Path(__file__).parent.parent
CAVEAT = "models are small trained ones in these shapes: acceptance is the small model's, time is the big shape's"
_TESTS_SECONDS = 180.0
_LAST_MODEL = 60.0  # a model is not begun with less time left

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        shapes: by preset, the model's name and its drafters by label.
        batches, prefixes, nodes: of passes and kernels; ``nodes`` of whole answers are one less, the root left out.
        new, rounds: tokens of an answer, and how often it is decoded.
        tests: arguments of pytest.
    """

    shapes: dict[str, tuple[str, dict[str, str]]]
    batches: tuple[int, ...] = (1, 4, 16)
    prefixes: tuple[int, ...] = (1000, 8000)
    nodes: tuple[int, ...] = (16, 32, 64)
    vocab: int = 32064
    new: int = 128
    rounds: int = 3
    tests: tuple[str, ...] = ("-m", "gpu", "tests")


_VISION = {"msd": "msd", "flash": "flash"}
FULL = Plan(
    {
        "7b": ("tiny-llava", _VISION),
        "8b-hybrid": ("tiny-hybrid", {"auto": "auto", "ngram": "ngram"}),
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
        found: dict[str, Callable[[], Rows]] = {
            "memory": self.memory,
            "tests": self.tests,
            "attention": self.attention,
            "verification": self.verification,
            "growing": self.growing,
            "compaction": self.compaction,
            "scans": self.scans,
        }
        return found | {f"model {preset}": partial(self.model, preset) for preset in self.plan.shapes}

    def memory(self) -> Rows:
        self.bandwidth = gpu_kernels.bandwidth(self.device)
        yield {"copy_gb_per_second": self.bandwidth / 1e9}

    def tests(self) -> Rows:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *self.plan.tests]
        limit = min(_TESTS_SECONDS, self.left)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
        lines = done.stdout.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        yield {"status": done.returncode, "summary": lines[-1] if lines else done.stderr[-300:], "failed": failed}

    def attention(self) -> Rows:
        plan = self.plan
        for preset in dict.fromkeys(["7b", *plan.shapes]):
            shape = self.shape(preset)
            for batch in (plan.batches[0], plan.batches[-1]) if preset == "7b" else plan.batches[:1]:
                for prefix in plan.prefixes:
                    for nodes in (1, plan.nodes[-1]) if batch == 1 else plan.nodes[:1]:
                        if batch * prefix <= 20_000:
                            flex = preset == "7b" and nodes > 1 and self.left > 300
                            row = gpu_kernels.attention(self.place, shape, batch, prefix, nodes, flex)
                            yield {"shape": preset, **row}

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

    def model(self, preset: str) -> Rows:
        name, drafters = self.plan.shapes[preset]
        if self.left < _LAST_MODEL:
            raise TimeoutError(f"{self.left:.0f} s are left: a model takes {_LAST_MODEL:.0f}")
        big = gpu_models.build(name, self.shape(preset), drafters, self.device, self.dtype)
        hybrid, plan = name == "tiny-hybrid", self.plan
        parameters = big.pipe.model.num_parameters()
        yield {"parameters": parameters, "weight_bytes": big.weight_bytes, "build_seconds": big.build_seconds}
        for prefix in plan.prefixes:
            yield gpu_models.passes(big, 1, prefix, plan.nodes, self.bandwidth)
        for batch in plan.batches[1:]:
            yield gpu_models.passes(big, batch, plan.prefixes[0], plan.nodes[:1], self.bandwidth)
        sizes = tuple(nodes - 1 for nodes in plan.nodes)
        for batch in plan.batches:
            if self.left > 0:
                enough = lambda: self.left < 0  # noqa: E731
                yield from gpu_models.decoding(big, batch, sizes, plan.new, plan.rounds, hybrid, enough)
        if self.left > 0:
            yield gpu_models.transformers_generate(big, plan.new, hybrid)
        if self.device.type == "cuda":
            yield {"most_memory_bytes": torch.cuda.max_memory_allocated(self.device)}


def _folder(model: str) -> str:
    return str(plugins.find("models", model)())


def machine(device: torch.device) -> dict[str, Any]:
    """What results depend on."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "kernels": kernels.in_use(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }
    if device.type == "cuda":
        import triton

        found: Any = torch.cuda.get_device_properties(device)
        facts |= {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "memory_bytes": found.total_memory,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return facts


def run(bench: Bench, content: dict[str, Any], out: Path | None) -> None:
    """Run every part into ``content``, and write it after each."""
    wide = console()
    for name, part in bench.parts().items():
        start = clock()
        rows: list[dict[str, Any]] = []  # those before a failure are kept
        found: dict[str, Any] = {"rows": rows}
        try:
            for row in part():
                rows.append(row)
        except Exception as error:  # whatever it is, the other parts are worth having
            found["error"] = f"{type(error).__name__}: {error}"
            found["where"] = traceback.format_exc()[-2000:]
        found["seconds"] = clock() - start
        content["parts"][name] = found
        for table in tables(name, rows):
            wide.print(table)
        click.echo(f"{name}: {found.get('error', 'done')}, {found['seconds']:.0f} s", err=True)
        if out is not None:
            write_result(content, out)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def tables(name: str, rows: list[dict[str, Any]]) -> Iterator[Table]:
    """A table for each run of rows with the same columns."""
    table: Table | None = None
    columns: list[str] = []
    for row in rows:
        if table is None or list(row) != columns:
            if table is not None:
                yield table
            columns = list(row)
            table = Table(*columns, title=name)
        table.add_row(*map(_shown, row.values()))
    if table is not None:
        yield table


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(part)}" for key, part in value.items())
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


@click.command(cls=Measurement)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON here, after every part.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--minutes", default=8.0, show_default=True, help="Begin nothing after so many.")
@click.option("--quick", is_flag=True, help="Tiny shapes, to try the flow.")
@torch.inference_mode()
def main(out: Path | None, device: str, minutes: float, quick: bool) -> None:
    """Measure a GPU: a table for each part, then one JSON line."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("expected a CUDA device, found none (--device cpu --quick tries the flow without one)")
    if where.type != "cuda" and not quick:
        raise UserError(f"real shapes need a CUDA device: got {device!r} (--quick takes tiny ones)")
    bench = Bench(QUICK if quick else FULL, where, 60 * minutes, quick)
    content: dict[str, Any] = {"caveat": CAVEAT, **machine(where), "quick": quick, "parts": {}}
    run(bench, content, out)
    print_result(content, out)
    if failed := [name for name, part in content["parts"].items() if "error" in part]:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
