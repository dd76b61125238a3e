"""Products of quantised weights against the limits of the processor: ``python -m mmspec.eval roofline``.

For each format and number of rows: the time of a product with weights that do not fit in caches, and its share of two
limits: a loop that only reads as many bytes, and multiply-adds with operands in registers. Calls are interleaved; times
are medians, shares medians of shares within a round.

With ``--model``: the time of a pass with more threads than the machine has, by a simulation of the loops over its
products with measured costs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from itertools import product
from statistics import median
from time import perf_counter as clock
from typing import Any

import click
import torch
from torch import Tensor

import mmspec
from mmspec.cli.options import Listed
from mmspec.eval.harness.output import Column, benchmark, make_table, processor, wide_console
from mmspec.eval.harness.timing import pass_seconds, rotated, wait_for_huge_pages
from mmspec.eval.suite import SIZES
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BlockLinear

FORMATS = ("int4", "int8", "bfloat16", "q5", "q4_k", "q5_k", "q6_k")
INPUTS = 4096  # input features of the weights
READ = "read"
_INSTRUCTIONS = 1_000_000  # rounds of ``multiply_add``
_RUN, _SHARE = 1 << 16, 2  # of ``cpp/products.h`` and ``cpp/pool.h``
_CLAIMS = 11  # chunks of a loop of 64 items in two threads, at least 2 items each
_DEPTH = 42  # tokens before a simulated pass
_SIMULATED = (1, 2, 4, 8, 16)  # threads
_SIMULATION: list[Column] = [
    ("nodes", "{nodes}"),
    ("threads", "{threads}"),
    ("simulated", "{simulated:.1f}"),
    ("measured", "{measured:.1f}"),
    ("rest, serial", "{rest:.1f}"),
]

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
    ``seconds`` by round are of products by (format, rows), of multiply-adds by format, and of ``READ``."""
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


@dataclass(frozen=True)
class Costs:
    """Measured costs of the loops over products.

    Attributes:
        read: seconds per byte of a thread that reads alone.
        share: growth of ``read`` for each further thread, as measured with two.
        products: seconds per byte of weights by kind, of one thread's products.
        claim, barrier: seconds to claim a chunk, and to end a loop, for each further thread.
    """

    read: float
    share: float
    products: Mapping[str, float]
    claim: float
    barrier: float


Layer = tuple[str, int, int]
"""Kind of a layer's blocks, their bytes and their number; a loop claims them in chunks."""


def simulated(layers: Sequence[Layer], costs: Costs, threads: int) -> float:
    """Seconds of the products of all layers, one loop each."""
    others, total = threads - 1, 0.0
    for kind, size, blocks in layers:
        seconds = size * max(costs.products[kind], costs.read * (1 + costs.share * others))
        free, left = [0.0] * threads, blocks
        while left > 0:
            chunk = min(left, max(1, _RUN // size, -(-left // (_SHARE * threads))))
            heapreplace(free, free[0] + costs.claim * others + chunk * seconds)
            left -= chunk
        total += max(free) + costs.barrier * others
    return total


def costs_of(library: ctypes.CDLL, memory: Tensor, kinds: Sequence[str], rows: int, rounds: int) -> Costs:
    """Measure the costs of loops with one and two threads."""
    torch.set_num_threads(1)
    limits, table = measure(library, memory, kinds, [rows], rounds)
    torch.set_num_threads(2)
    both, _ = measure(library, memory, [], [], rounds)

    def seconds(loops: int, threads: int) -> float:
        taken = []
        for _ in range(100 * rounds):
            start = clock()
            library.multiply_add(0, loops, threads)
            taken.append(clock() - start)
        return median(taken)

    # Loops of 2 and of 64 short items, in 2 and in _CLAIMS chunks.
    two, many = (max(seconds(loops, 2) - seconds(loops, 1), 0.0) for loops in (2, 64))
    claim = max(many - two, 0.0) / (_CLAIMS - 2)
    products = {row["weights"]: 1e-9 / row["gigabytes"] for row in table}
    share = max(2 * limits[READ] / both[READ] - 1, 0.0)
    return Costs(1e-9 / limits[READ], share, products, claim, max(two - 2 * claim, 0.0))


def simulate(library: ctypes.CDLL, memory: Tensor, model: str, nodes: int, rounds: int) -> list[dict[str, Any]]:
    """Simulated times of a pass by number of threads, with measured times of one and two threads. The rest of a pass
    (attention, norms, Python) takes the measured time of one thread less its products, with any number of threads."""
    target = mmspec.load(model, drafter=None).target
    wait_for_huge_pages()
    packed = [part for part in target.model.modules() if isinstance(part, BlockLinear)]
    layers = [(part.kind, part._blocks.shape[1], len(part._blocks)) for part in packed]
    costs = costs_of(library, memory, sorted({kind for kind, *_ in layers}), nodes, rounds)
    measured: dict[int, list[float]] = {1: [], 2: []}
    for turn, count in product(range(rounds + 1), measured):  # the first is a warm-up
        torch.set_num_threads(count)
        measured[count] += [pass_seconds(target, _DEPTH, [nodes])[nodes]] if turn else []
    rest = median(measured[1]) - simulated(layers, costs, 1)
    rows = []
    for count in _SIMULATED:
        row: dict[str, Any] = {
            "nodes": nodes,
            "threads": count,
            "simulated": 1000 * (rest + simulated(layers, costs, count)),
        }
        row["measured"] = 1000 * median(measured[count]) if count in measured else None
        rows.append({**row, "rest": 1000 * rest, **vars(costs)})
    return rows


@benchmark
@click.option("--formats", type=Listed(click.Choice(FORMATS)), default=",".join(FORMATS), show_default=True)
@click.option("--rows", type=SIZES, default="1,2,4,8,16,64", show_default=True)
@click.option("--mib", default=128, show_default=True, help="Size of the weights; caches should hold less.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--model", help="Simulate its passes, over --nodes nodes, with 1 to 16 threads.")
@click.option("--nodes", type=SIZES, default="1,8,16", show_default=True)
def main(
    formats: Sequence[str], rows: Sequence[int], mib: int, rounds: int, model: str | None, nodes: Sequence[int]
) -> dict[str, Any]:
    """Measure products against the processor's limits: a table per build of the kernels, then one JSON line."""
    memory = cpu.zeros(mib << 20)
    memory.copy_(torch.randint(60, (len(memory),), dtype=torch.uint8))  # float16 numbers in it are less than 2
    if moving := cpu.use_huge_pages(memory):
        moving.join()
    about: dict[str, Any] = {"processor": processor(), "threads": torch.get_num_threads(), "mib": mib, "rounds": rounds}
    if model is not None:
        loaded = cpu_library.functions()
        simulation = [row for count in nodes for row in simulate(loaded, memory, model, count, rounds)]
        wide_console().print(make_table(_SIMULATION, simulation, sections=["nodes"], title="ms per pass"))
        return {**about, "model": model, "rows": simulation}
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
    return {**about, "builds": builds}
