"""The scan and the convolution over a tree, timed by themselves: ``python -m eval.ssm_ops``.

One Mamba-2 layer's part of a step over a binary tree of N nodes, in two ways that must agree:

- tree: ``ssm.ops.tree_scan`` for all nodes at once, then ``commit_scan`` of the path to the last node;
- snapshots: the recurrence node by node, which keeps the state behind each, as serving engines do, in memory allocated
  once; its commit copies one of them.

All trees of a shape run in turn; then, for each, the two ways, whose ratio is of a scan and a commit. Memory is what
each way has alive at once above what it was given, as a share of the layer's state. Times are medians over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import torch
from rich.table import Table
from torch import Tensor

from eval.harness.command import Measurement, console, print_result, whole_numbers
from eval.ssm_memory import peak
from mmspec import kernels
from mmspec.cli.options import OUT_FILE
from mmspec.errors import UserError
from mmspec.tree import TokenTree
from ssm import ops

SHAPES = {
    "small": dict(heads=8, head_dim=64, groups=1, state=64),
    "bamba": dict(heads=128, head_dim=64, groups=1, state=128),
    "nemotron": dict(heads=128, head_dim=64, groups=8, state=128),
}
"""A layer of about tiny-hybrid's size, of Bamba-9B and of Nemotron-H-8B."""

WIDTH = 4


class Layer:
    """Random inputs of one layer for one tree, and the two ways over them."""

    def __init__(self, batch: int, nodes: int, dtype: torch.dtype, device: str, shape: dict[str, int]) -> None:
        heads, head_dim, groups, size = (shape[name] for name in ("heads", "head_dim", "groups", "state"))
        g = torch.Generator().manual_seed(0)
        shares = [heads * head_dim, groups * size, groups * size]

        def numbers(*dims: int, to: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*dims, generator=g).to(device, to)

        self.parents = (torch.arange(nodes, device=device) - 1).div(2, rounding_mode="floor").expand(batch, -1)
        self.tree = TokenTree(torch.zeros_like(self.parents), self.parents, check=False)
        self.path = self.tree.ancestors[0, -1].nonzero().T.expand(batch, -1).contiguous()
        self.window = ops.conv_window(self.parents, WIDTH)
        self.channels = numbers(batch, nodes, sum(shares), to=dtype)
        x, b, c = self.channels.split(shares, dim=-1)
        self.x = x.unflatten(2, (heads, head_dim))
        self.b, self.c = (t.unflatten(2, (groups, size)) for t in (b, c))
        self.dt = torch.rand(batch, nodes, heads, generator=g).to(device)
        self.a = -torch.linspace(0.5, 16, heads, device=device)
        self.d, self.state = numbers(heads), numbers(batch, heads, head_dim, size)
        self.conv_state = numbers(batch, sum(shares), WIDTH - 1, to=dtype)
        self.kept = self.state.new_empty(0)  # what snapshots are kept in, once asked for
        self.weight, self.bias = numbers(sum(shares), WIDTH, to=dtype), numbers(sum(shares), to=dtype)

    def scan(self) -> Tensor:
        return ops.tree_scan(self.x, self.dt, self.a, self.b, self.c, self.d, self.state, self.tree.ancestors)

    def commit(self) -> None:
        ops.commit_scan(self.x, self.dt, self.a, self.b, self.state, self.path)

    def convolve(self) -> Tensor:
        return ops.tree_conv(self.channels, self.conv_state, self.weight, self.bias, self.window)

    def recur(self) -> Tensor:
        """The outputs; keeps the states behind all nodes."""
        batch, nodes, heads, head_dim = self.x.shape
        groups, size = self.b.shape[2:]
        shape = (nodes, batch, groups, heads // groups, head_dim, size)
        if not self.kept.numel():
            self.kept = self.state.new_empty(shape)
        decay = (self.dt * self.a).exp_().view(batch, nodes, *shape[2:4], 1, 1)
        entering = (self.dt[..., None] * self.x).view(batch, nodes, *shape[2:5], 1)
        b, c = self.b.float()[:, :, :, None, None], self.c.float()[:, :, :, None, :, None]
        y = self.state.new_empty(batch, nodes, *shape[2:5])
        for node, parent in enumerate(self.parents[0].tolist()):
            before = self.state.view(shape[1:]) if parent < 0 else self.kept[parent]
            after = torch.mul(before, decay[:, node], out=self.kept[node]).addcmul_(entering[:, node], b[:, node])
            y[:, node] = (after @ c[:, node])[..., 0]
        return y.view(self.x.shape).addcmul_(self.x.float(), self.d[:, None])

    def restore(self) -> None:
        self.state.copy_(self.kept[-1].view_as(self.state))

    def check(self) -> None:
        """The two ways agree at every node and on the state behind the path; the states are as before then.

        Raises:
            AssertionError: they do not.
        """
        before = self.state.clone()
        torch.testing.assert_close(self.scan(), self.recur(), rtol=1e-3, atol=1e-3)
        self.commit()
        torch.testing.assert_close(self.state, self.kept[-1].view_as(self.state), rtol=1e-4, atol=1e-4)
        self.state.copy_(before)


def timed(ways: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Seconds by way, medians."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        shift = turn % len(ways)
        for name, run in [*ways.items()][shift:] + [*ways.items()][:shift]:
            start = clock()
            run()
            if device != "cpu":
                torch.cuda.synchronize(device)
            if turn >= 2:
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def most_alive(run: Callable[[], Any], device: str) -> int:
    """Bytes at most, above what was there before."""
    if device == "cpu":
        return peak(run)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return int(torch.cuda.max_memory_allocated(device)) - before


def measure(layers: Sequence[Layer], rounds: int, device: str) -> list[dict[str, Any]]:
    """A row of the table for each layer: one shape, trees of different sizes, the first a root alone."""
    parts: dict[str, Callable[[], Any]] = {}
    for index, layer in enumerate(layers):
        layer.check()
        parts |= {f"scan {index}": layer.scan, f"commit {index}": layer.commit, f"conv {index}": layer.convolve}
    seconds = timed(parts, rounds, device)
    rows = []
    for index, layer in enumerate(layers):
        row: dict[str, Any] = {"nodes": layer.x.shape[1]}
        row |= {f"{part}_seconds": seconds[f"{part} {index}"] for part in ("scan", "commit", "conv")}
        row |= {f"{part}_over_one": seconds[f"{part} {index}"] / seconds[f"{part} 0"] for part in ("scan", "conv")}
        ways = {"scan": layer.scan, "commit": layer.commit, "recur": layer.recur, "restore": layer.restore}
        both = timed(ways, rounds, device)
        row |= {
            "snapshots_seconds": both["recur"] + both["restore"],
            "snapshots_over_tree": (both["recur"] + both["restore"]) / (both["scan"] + both["commit"]),
            "state_bytes": layer.state.numel() * layer.state.element_size(),
            "tree_bytes": max(most_alive(layer.scan, device), most_alive(layer.commit, device)),
            "snapshots_bytes": most_alive(layer.recur, device) + layer.kept.numel() * layer.kept.element_size(),
        }
        rows.append(row)
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table("shape", "nodes", "scan ms", "over one", "conv ms", "over one", "commit ms")
    for name in ("snapshots ms", "over tree", "memory tree", "memory snapshots"):
        table.add_column(name)
    for row in rows:
        milliseconds = {
            name: f"{1000 * row[f'{name}_seconds']:.3f}" for name in ("scan", "conv", "commit", "snapshots")
        }
        table.add_row(
            row["shape"],
            str(row["nodes"]),
            milliseconds["scan"],
            f"{row['scan_over_one']:.2f}",
            milliseconds["conv"],
            f"{row['conv_over_one']:.2f}",
            milliseconds["commit"],
            milliseconds["snapshots"],
            f"{row['snapshots_over_tree']:.2f}",
            *(f"{100 * row[f'{way}_bytes'] / row['state_bytes']:.0f} %" for way in ("tree", "snapshots")),
        )
    console().print(table)


@click.command(cls=Measurement)
@click.option("--shapes", default=",".join(SHAPES), show_default=True)
@click.option("--nodes", default="4,16,64", show_default=True, help="Sizes of trees, beside 1.")
@click.option("--batch", default=1, show_default=True)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--device", default="cpu", show_default=True)
@click.option("--rounds", default=50, show_default=True)
@click.option("--out", type=OUT_FILE, help="Write the JSON line here too.")
@torch.inference_mode()
def main(shapes: str, nodes: str, batch: int, dtype: str, device: str, rounds: int, out: Path | None) -> None:
    """Time the operations of a Mamba-2 layer over trees: a table, then one JSON line."""
    unknown = [name for name in shapes.split(",") if name not in SHAPES]
    if unknown:
        raise UserError(f"shapes must be among {', '.join(SHAPES)}: got {unknown[0]!r}")
    rows = []
    for name in shapes.split(","):
        sizes = list(dict.fromkeys([1, *whole_numbers(nodes, "nodes")]))
        layers = [Layer(batch, size, getattr(torch, dtype), device, SHAPES[name]) for size in sizes]
        rows += [{"shape": name, **row} for row in measure(layers, rounds, device)]
    report(rows)
    facts = {"batch": batch, "dtype": dtype, "device": device, "kernels": kernels.in_use(torch.device(device))}
    print_result({**facts, "threads": torch.get_num_threads(), "rounds": rounds, "rows": rows}, out)


if __name__ == "__main__":
    main()
