"""Micro-benchmark of a Mamba-2 layer's scan, convolution and commit over a tree.

Two implementations of one layer's step over a binary tree of N nodes, checked against each other:

- tree: ``mmspec.ssm.ops.tree_scan`` over all nodes at once, then ``commit_scan`` of the path to the last node;
- snapshots: the recurrence node by node with the state of every node stored, as serving engines do; memory is allocated
  once, and the commit copies one of the states.

All trees of a shape are timed interleaved; then, for each tree, both implementations, whose ratio is of scan plus
commit. Memory is the peak of live allocations above the inputs, relative to the layer's state. Times are medians.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from mmspec.core.tree import TokenTree
from mmspec.eval.harness.output import Column, make_table, milliseconds
from mmspec.eval.harness.timing import interleaved_medians
from mmspec.eval.kernels.state_memory import peak_cpu_bytes
from mmspec.ssm import ops

SHAPES = {
    "small": dict(heads=8, head_dim=64, groups=1, state=64),
    "bamba": dict(heads=128, head_dim=64, groups=1, state=128),
    "nemotron": dict(heads=128, head_dim=64, groups=8, state=128),
}
"""Layers of about tiny-hybrid's size, of Bamba-9B and of Nemotron-H-8B."""

WIDTH = 4
"""Width of the convolution."""


class Mamba2Layer:
    """Random inputs of one layer for one tree, and both implementations.

    Args:
        shape: one of ``SHAPES``.
    """

    def __init__(self, batch: int, nodes: int, dtype: torch.dtype, device: str, shape: dict[str, int]) -> None:
        heads, head_dim, groups, size = (shape[name] for name in ("heads", "head_dim", "groups", "state"))
        g = torch.Generator().manual_seed(0)
        shares = [heads * head_dim, groups * size, groups * size]

        def randn(*dims: int, to: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*dims, generator=g).to(device, to)

        self.parents = (torch.arange(nodes, device=device) - 1).div(2, rounding_mode="floor").expand(batch, -1)
        self.tree = TokenTree(torch.zeros_like(self.parents), self.parents, check=False)
        self.path = self.tree.ancestors[0, -1].nonzero().T.expand(batch, -1).contiguous()
        self.window = ops.conv_window(self.parents, WIDTH)
        self.channels = randn(batch, nodes, sum(shares), to=dtype)
        x, b, c = self.channels.split(shares, dim=-1)
        self.x = x.unflatten(2, (heads, head_dim))
        self.b, self.c = (t.unflatten(2, (groups, size)) for t in (b, c))
        self.dt = torch.rand(batch, nodes, heads, generator=g).to(device)
        self.a = -torch.linspace(0.5, 16, heads, device=device)
        self.d, self.state = randn(heads), randn(batch, heads, head_dim, size)
        self.conv_state = randn(batch, sum(shares), WIDTH - 1, to=dtype)
        self.snapshots = self.state.new_empty(0)  # allocated by the first call of `recur`
        self.weight, self.bias = randn(sum(shares), WIDTH, to=dtype), randn(sum(shares), to=dtype)

    def scan(self) -> Tensor:
        return ops.tree_scan(self.x, self.dt, self.a, self.b, self.c, self.d, self.state, self.tree.ancestors)

    def commit(self) -> None:
        ops.commit_scan(self.x, self.dt, self.a, self.b, self.state, self.path)

    def convolve(self) -> Tensor:
        return ops.tree_conv(self.channels, self.conv_state, self.weight, self.bias, self.window)

    def recur(self) -> Tensor:
        """Outputs of the node-by-node recurrence; stores the state after every node in ``snapshots``."""
        batch, nodes, heads, head_dim = self.x.shape
        groups, size = self.b.shape[2:]
        shape = (nodes, batch, groups, heads // groups, head_dim, size)
        if not self.snapshots.numel():
            self.snapshots = self.state.new_empty(shape)
        decay = (self.dt * self.a).exp_().view(batch, nodes, *shape[2:4], 1, 1)
        update = (self.dt[..., None] * self.x).view(batch, nodes, *shape[2:5], 1)
        b, c = self.b.float()[:, :, :, None, None], self.c.float()[:, :, :, None, :, None]
        y = self.state.new_empty(batch, nodes, *shape[2:5])
        for node, parent in enumerate(self.parents[0].tolist()):
            before = self.state.view(shape[1:]) if parent < 0 else self.snapshots[parent]
            after = torch.mul(before, decay[:, node], out=self.snapshots[node]).addcmul_(update[:, node], b[:, node])
            y[:, node] = (after @ c[:, node])[..., 0]
        return y.view(self.x.shape).addcmul_(self.x.float(), self.d[:, None])

    def restore(self) -> None:
        self.state.copy_(self.snapshots[-1].view_as(self.state))

    def check(self) -> None:
        """Compare both implementations at every node and on the committed state; the state is restored afterwards.

        Raises:
            AssertionError: they differ.
        """
        before = self.state.clone()
        torch.testing.assert_close(self.scan(), self.recur(), rtol=1e-3, atol=1e-3)
        self.commit()
        torch.testing.assert_close(self.state, self.snapshots[-1].view_as(self.state), rtol=1e-4, atol=1e-4)
        self.state.copy_(before)


def _peak_bytes(run: Callable[[], Any], device: str) -> int:
    """Peak of the memory that a call allocates."""
    if device == "cpu":
        return peak_cpu_bytes(run)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return int(torch.cuda.max_memory_allocated(device)) - before


def measure_layers(layers: Sequence[Mamba2Layer], rounds: int, device: str) -> list[dict[str, Any]]:
    """A row of figures per layer. The layers have one shape and trees of different sizes, the first a root alone."""

    def medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        synchronize = (lambda: None) if device == "cpu" else partial(torch.cuda.synchronize, device)
        return interleaved_medians(calls, rounds, 2, synchronize)

    parts: dict[str, Callable[[], Any]] = {}
    for index, layer in enumerate(layers):
        layer.check()
        parts |= {f"scan {index}": layer.scan, f"commit {index}": layer.commit, f"conv {index}": layer.convolve}
    seconds = medians(parts)
    rows = []
    for index, layer in enumerate(layers):
        row: dict[str, Any] = {"nodes": layer.x.shape[1]}
        row |= {f"{part}_seconds": seconds[f"{part} {index}"] for part in ("scan", "commit", "conv")}
        row |= {f"{part}_over_one": seconds[f"{part} {index}"] / seconds[f"{part} 0"] for part in ("scan", "conv")}
        steps = {"scan": layer.scan, "commit": layer.commit, "recur": layer.recur, "restore": layer.restore}
        both = medians(steps)
        snapshot_bytes = layer.snapshots.numel() * layer.snapshots.element_size()
        row |= {
            "snapshots_seconds": both["recur"] + both["restore"],
            "snapshots_over_tree": (both["recur"] + both["restore"]) / (both["scan"] + both["commit"]),
            "state_bytes": layer.state.numel() * layer.state.element_size(),
            "tree_bytes": max(_peak_bytes(layer.scan, device), _peak_bytes(layer.commit, device)),
            "snapshots_bytes": _peak_bytes(layer.recur, device) + snapshot_bytes,
        }
        rows.append(row)
    return rows


def layer_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per shape and tree size."""
    columns: list[Column] = [
        ("shape", "{shape}"),
        ("nodes", "{nodes}"),
        ("scan ms", milliseconds("scan_seconds", 3)),
        ("over one", "{scan_over_one:.2f}"),
        ("conv ms", milliseconds("conv_seconds", 3)),
        ("over one", "{conv_over_one:.2f}"),
        ("commit ms", milliseconds("commit_seconds", 3)),
        ("snapshots ms", milliseconds("snapshots_seconds", 3)),
        ("over tree", "{snapshots_over_tree:.2f}"),
        ("memory tree", lambda row: f"{100 * row['tree_bytes'] / row['state_bytes']:.0f} %"),
        ("memory snapshots", lambda row: f"{100 * row['snapshots_bytes'] / row['state_bytes']:.0f} %"),
    ]
    return make_table(columns, rows)
