"""Products of quantised weights against the limits of the processor: ``python -m mmspec.eval roofline``.

For each format and number of rows: how long a product takes whose weights do not fit in caches, and which share it
reaches of two limits, of reading as many bytes in a loop that does nothing else, and of multiply-adds with operands in
registers. Calls are interleaved; times are medians, shares medians over the rounds of shares within a round. There is a
table per build of the kernels (``mmspec.ops.cpu_library.BUILDS``) that this processor runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter as clock
from typing import Any

import click
import torch
from torch import Tensor

from mmspec.checks import choice, listed
from mmspec.cli.options import Value
from mmspec.eval.harness.output import Column, benchmark, make_table, processor, wide_console
from mmspec.eval.harness.timing import interleaved
from mmspec.eval.suite.settings import SIZES
from mmspec.ops import cpu, cpu_library

FORMATS = ("int4", "int8", "bfloat16", "q5", "q4_k", "q5_k", "q6_k")
INPUTS = 4096
"""Input features of the weights."""

READ = "read"
_INSTRUCTIONS = 1_000_000  # rounds of ``multiply_add``
_MIB = 1 << 20


def seconds_of(call: Callable[[], Any]) -> float:
    """Wall-clock seconds of a call."""
    start = clock()
    call()
    return clock() - start


def products(library: ctypes.CDLL, memory: Tensor, kind: str, rows: int) -> tuple[Callable[[], None], int]:
    """A matrix product with weights that fill ``memory``, and its number of output features."""
    size = cpu.bytes_of_blocks(kind, INPUTS, cpu.LANES)
    blocks, threads = memory[: len(memory) // size * size].view(-1, size), torch.get_num_threads()
    weights = cpu.linear_weights(kind, blocks, None, INPUTS, outputs := len(blocks) * cpu.LANES)
    x, out = torch.randn(rows, INPUTS, dtype=torch.float32), torch.empty(rows, outputs, dtype=torch.float32)
    return lambda: library.linear(weights, x.data_ptr(), rows, out.data_ptr(), threads), outputs


def measure(
    library: ctypes.CDLL, memory: Tensor, formats: Sequence[str], rows: Sequence[int], rounds: int
) -> tuple[dict[Any, list[float]], dict[str, int], dict[str, int]]:
    """Seconds, output features and multiply-adds, as ``table_rows`` takes them.

    Args:
        memory: (bytes,) uint8, whole KiB.
    """
    threads = torch.get_num_threads()
    calls: dict[Any, Callable[[], float]] = {}
    calls[READ] = partial(seconds_of, partial(library.read_bytes, memory.data_ptr(), len(memory), threads))
    outputs: dict[str, int] = {}
    done: dict[str, int] = {}
    for kind in formats:
        number = cpu_library.KINDS.index(kind)
        peak = partial(library.multiply_add, number, _INSTRUCTIONS, threads)
        calls[kind], done[kind] = partial(seconds_of, peak), peak()
        for count in rows:
            call, outputs[kind] = products(library, memory, kind, count)
            calls[kind, count] = partial(seconds_of, call)
    return interleaved(calls, rounds), outputs, done


def table_rows(
    seconds: Mapping[Any, Sequence[float]], outputs: Mapping[str, int], done: Mapping[str, int], size: int
) -> list[dict[str, Any]]:
    """Rows of the table.

    Args:
        seconds: seconds by round, of products by (format, rows), of multiply-adds by format, and of ``READ``.
        outputs: output features of a product by format.
        done: number of multiply-adds by format.
        size: bytes read.
    """
    rows = []
    for kind, count in (name for name in seconds if isinstance(name, tuple)):
        products, taken = count * INPUTS * outputs[kind], median(seconds[kind, count])
        weights = cpu.bytes_of_blocks(kind, INPUTS, outputs[kind])
        speeds = zip(seconds[kind, count], seconds[READ], seconds[kind], strict=True)
        shares = [(read * weights / (size * own), peak * products / (done[kind] * own)) for own, read, peak in speeds]
        row = {"weights": kind, "rows": count, "milliseconds": 1000 * taken, "gigabytes": weights / taken / 1e9}
        row |= {"of_reading": median(share for share, _ in shares), "products": products / taken / 1e9}
        rows.append({**row, "of_peak": median(share for _, share in shares)})
    return rows


_COLUMNS: list[Column] = [
    ("weights", "{weights}"),
    ("rows", "{rows}"),
    ("ms", "{milliseconds:.2f}"),
    ("GB/s", "{gigabytes:.1f}"),
    ("of reading", "{of_reading:.0%}"),
    ("G multiply-adds/s", "{products:.1f}"),
    ("of the peak", "{of_peak:.0%}"),
]


@benchmark
@click.option("--formats", type=Value(listed(choice(*FORMATS))), default=",".join(FORMATS), show_default=True)
@click.option("--rows", type=SIZES, default="1,2,4,8,16,64", show_default=True)
@click.option("--mib", default=128, show_default=True, help="Size of the weights; caches should hold less.")
@click.option("--rounds", default=9, show_default=True)
def main(formats: Sequence[str], rows: Sequence[int], mib: int, rounds: int) -> dict[str, Any]:
    """Measure products against the processor's limits: a table per build of the kernels, then one JSON line."""
    memory = cpu.zeros(mib * _MIB)
    memory.copy_(torch.randint(60, (len(memory),), dtype=torch.uint8))  # float16 numbers in it are less than 2
    if moving := cpu.use_huge_pages(memory):
        moving.join()
    builds: dict[str, Any] = {}
    for name, flags in cpu_library.BUILDS.items():
        library = cpu_library.compiled(flags)
        if isinstance(library, str):
            click.echo(f"{name}: {library}", err=True)
        elif library.instructions().decode() == name:
            seconds, outputs, done = measure(library, memory, formats, rows, rounds)
            limits = {READ: len(memory) / median(seconds[READ]) / 1e9}
            limits |= {kind: done[kind] / median(seconds[kind]) / 1e9 for kind in formats}
            builds[name] = {"limits": limits, "rows": table_rows(seconds, outputs, done, len(memory))}
            title = (
                f"{name}: reads {limits[READ]:.1f} GB/s, {max(limits[kind] for kind in formats):.0f} G multiply-adds/s"
            )
            wide_console().print(make_table(_COLUMNS, builds[name]["rows"], sections=["weights"], title=title))
    about = {"processor": processor(), "threads": torch.get_num_threads(), "mib": mib, "rounds": rounds}
    return {**about, "builds": builds}
