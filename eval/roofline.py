"""Products of quantised weights against the limits of the processor: ``python -m mmspec.eval roofline``.

For each format and number of rows: the time of a product with weights that do not fit in caches, and its share of two
limits: a loop that only reads as many bytes, and multiply-adds with operands in registers. Calls are interleaved; times
are medians, shares medians of shares within a round.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter as clock
from typing import Any

import click
import torch
from torch import Tensor

from mmspec.cli.options import Listed
from mmspec.eval.harness.output import Column, benchmark, make_table, processor, wide_console
from mmspec.eval.harness.timing import rotated
from mmspec.eval.suite import SIZES
from mmspec.ops import cpu, cpu_library

FORMATS = ("int4", "int8", "bfloat16", "q5", "q4_k", "q5_k", "q6_k")
INPUTS = 4096
"""Input features of the weights."""

READ = "read"
_INSTRUCTIONS = 1_000_000  # rounds of ``multiply_add``

COLUMNS: list[Column] = [
    ("weights", "{weights}"),
    ("rows", "{rows}"),
    ("ms", "{milliseconds:.2f}"),
    ("GB/s", "{gigabytes:.1f}"),
    ("of reading", "{of_reading:.0%}"),
    ("G multiply-adds/s", "{products:.1f}"),
    ("of the peak", "{of_peak:.0%}"),
]


def _multiply(library: ctypes.CDLL, weights: Any, x: Tensor, out: Tensor, threads: int) -> None:
    library.linear(weights, x.data_ptr(), len(x), out.data_ptr(), threads)


def measure(
    library: ctypes.CDLL, memory: Tensor, formats: Sequence[str], rows: Sequence[int], rounds: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Time products with weights that fill ``memory`` (uint8, whole KiB). Returns the limits, GB/s of ``READ`` and
    billions of multiply-adds per second by format; and rows of the table."""
    threads = torch.get_num_threads()
    calls: dict[Any, Callable[[], Any]] = {READ: partial(library.read_bytes, memory.data_ptr(), len(memory), threads)}
    outputs: dict[str, int] = {}
    done: dict[str, int] = {}
    for kind in formats:
        calls[kind] = partial(library.multiply_add, cpu_library.KINDS.index(kind), _INSTRUCTIONS, threads)
        done[kind] = calls[kind]()
        size = cpu.bytes_of_blocks(kind, INPUTS, cpu.LANES)
        blocks = memory[: len(memory) // size * size].view(-1, size)
        outputs[kind] = len(blocks) * cpu.LANES
        weights = cpu.linear_weights(kind, blocks, None, INPUTS, outputs[kind])
        for count in rows:
            x, out = (torch.randn(count, width, dtype=torch.float32) for width in (INPUTS, outputs[kind]))
            calls[kind, count] = partial(_multiply, library, weights, x, out, threads)
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):  # the first is a warm-up
        for name, call in rotated(list(calls.items()), turn):
            start = clock()
            call()
            seconds[name] += [clock() - start] if turn else []
    limits = {kind: done[kind] / median(seconds[kind]) / 1e9 for kind in formats}
    limits[READ] = len(memory) / median(seconds[READ]) / 1e9
    return limits, table_rows(seconds, outputs, done, len(memory))


def table_rows(seconds: Any, outputs: dict[str, int], done: dict[str, int], size: int) -> list[dict[str, Any]]:
    """Rows of the table, from output features and numbers of multiply-adds by format, and the ``size`` read in bytes.

    ``seconds`` by round are of products by (format, rows), of multiply-adds by format, and of ``READ``.
    """
    rows = []
    for kind, count in (name for name in seconds if isinstance(name, tuple)):
        products, taken = count * INPUTS * outputs[kind], median(seconds[kind, count])
        weights = cpu.bytes_of_blocks(kind, INPUTS, outputs[kind])
        speeds = list(zip(seconds[kind, count], seconds[READ], seconds[kind], strict=True))
        row = {"weights": kind, "rows": count, "milliseconds": 1000 * taken, "gigabytes": weights / taken / 1e9}
        row |= {"of_reading": median(read * weights / (size * own) for own, read, _ in speeds)}
        row |= {"products": products / taken / 1e9}
        rows.append({**row, "of_peak": median(peak * products / (done[kind] * own) for own, _, peak in speeds)})
    return rows


@benchmark
@click.option("--formats", type=Listed(click.Choice(FORMATS)), default=",".join(FORMATS), show_default=True)
@click.option("--rows", type=SIZES, default="1,2,4,8,16,64", show_default=True)
@click.option("--mib", default=128, show_default=True, help="Size of the weights; caches should hold less.")
@click.option("--rounds", default=9, show_default=True)
def main(formats: Sequence[str], rows: Sequence[int], mib: int, rounds: int) -> dict[str, Any]:
    """Measure products against the processor's limits: a table per build of the kernels, then one JSON line."""
    memory = cpu.zeros(mib << 20)
    memory.copy_(torch.randint(60, (len(memory),), dtype=torch.uint8))  # float16 numbers in it are less than 2
    if moving := cpu.use_huge_pages(memory):
        moving.join()
    builds: dict[str, Any] = {}
    for name, flags in cpu_library.BUILDS.items():
        library = cpu_library.compiled(flags)
        if isinstance(library, str):
            click.echo(f"{name}: {library}", err=True)
        elif library.instructions().decode() == name:
            limits, table = measure(library, memory, formats, rows, rounds)
            builds[name] = {"limits": limits, "rows": table}
            peak = max(limits[kind] for kind in formats)
            title = f"{name}: reads {limits[READ]:.1f} GB/s, {peak:.0f} G multiply-adds/s"
            wide_console().print(make_table(COLUMNS, table, sections=["weights"], title=title))
    about = {"processor": processor(), "threads": torch.get_num_threads(), "mib": mib, "rounds": rounds}
    return {**about, "builds": builds}
