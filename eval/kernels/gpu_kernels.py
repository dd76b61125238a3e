"""Timing of a decode step's kernels against their memory floor and their alternatives, for ``mmspec.eval.gpu``.

A kernel's floor is the bytes that it must read and write over the bandwidth of a large copy on the same device. Every
kernel is checked against its torch reference before it is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import ops
from mmspec.core.tree import TokenTree
from mmspec.eval.harness.measuring import interleaved_medians
from mmspec.eval.scale_up.axes import Shape
from mmspec.ssm import ops as mamba_ops

MAMBA_SHAPES = {
    "small": dict(heads=8, head_dim=64, groups=1, state=64),
    "bamba": dict(heads=128, head_dim=64, groups=1, state=128),
    "nemotron": dict(heads=128, head_dim=64, groups=8, state=128),
}
"""Layers of about tiny-hybrid's size, of Bamba-9B and of Nemotron-H-8B."""

_WIDTH = 4  # of the convolution
_CPU_ROUNDS = 5  # times on a CPU are a rehearsal only


def median_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call; on a GPU with a cold L2 cache before each call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=20, rep=80, return_mode="median") / 1000
    return interleaved_medians({"call": run}, _CPU_ROUNDS, warm_up=0)["call"]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy larger than all caches."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 22), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device)


def reference_kernels() -> Any:
    """A context in which the torch reference of every operation runs."""
    return mock.patch.dict(os.environ, {"MMSPEC_KERNELS": "reference"})


def check_against_reference(run: Callable[[], Tensor], tolerance: float = 0.0) -> None:
    """Compare an operation with its torch reference.

    Raises:
        AssertionError: they differ.
    """
    output = run()
    with reference_kernels():
        torch.testing.assert_close(output, run(), atol=tolerance, rtol=tolerance)


def binary_tree(batch: int, nodes: int, device: torch.device) -> TokenTree:
    """A binary tree in which node i has the parent (i - 1) // 2 and the token i."""
    index = torch.arange(nodes, device=device).expand(batch, -1)
    return TokenTree(index, (index - 1).div(2, rounding_mode="floor"), check=False)


@dataclass(frozen=True)
class KernelTimer:
    """Times kernels.

    Attributes:
        device: to run on.
        bandwidth: of the device's memory, in bytes per second.
        dtype: of the kernels' inputs.
    """

    device: torch.device
    bandwidth: float
    dtype: torch.dtype

    def row(self, run: Callable[[], Any], num_bytes: int, **facts: Any) -> dict[str, Any]:
        """A row of figures: microseconds of a call, of its floor, and their ratio.

        Args:
            num_bytes: that the call must read and write.
            **facts: more fields of the row.
        """
        seconds, floor = median_seconds(run, self.device), num_bytes / self.bandwidth
        return {**facts, "us": 1e6 * seconds, "floor_us": 1e6 * floor, "over_floor": seconds / floor}


def time_attention(timer: KernelTimer, shape: Shape, batch: int, prefix: int, nodes: int) -> dict[str, Any]:
    """Tree attention of one layer: the kernel, and torch's SDPA with repeated KV heads."""
    g = torch.Generator(timer.device).manual_seed(0)

    def randn(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, shape.head_dim, generator=g, device=timer.device, dtype=timer.dtype)

    query, slots = randn(shape.heads, nodes), prefix + nodes
    key, value = randn(shape.kv_heads, slots), randn(shape.kv_heads, slots)
    tree = binary_tree(batch, nodes, timer.device)
    lengths = torch.full((batch,), prefix, device=timer.device)
    mask = tree.ancestors.contiguous()
    full = torch.cat([mask.new_ones(batch, nodes, prefix), mask], dim=2)[:, None]
    group = shape.heads // shape.kv_heads

    def attend() -> Tensor:
        return ops.tree_attention(query, key, value, lengths, mask, start=lengths[:1])

    def repeated() -> Tensor:
        keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value)) if group > 1 else (key, value)
        return F.scaled_dot_product_attention(query, keys, values, full).transpose(1, 2)

    check_against_reference(attend, 2e-2)
    torch.testing.assert_close(attend(), repeated(), atol=2e-2, rtol=2e-2)
    size = query.element_size()
    num_bytes = size * (key.numel() + value.numel() + 2 * query.numel())
    facts = {"batch": batch, "prefix": prefix, "nodes": nodes, "heads": shape.heads, "kv_heads": shape.kv_heads}
    row = timer.row(attend, num_bytes, **facts)
    row["sdpa_us"] = 1e6 * median_seconds(repeated, timer.device)
    return row


def time_verification(timer: KernelTimer, batch: int, nodes: int, vocab: int) -> list[dict[str, Any]]:
    """Kernels of verification: longest accepted path, sampling at every node, rejection sampling of drawn trees."""
    device = timer.device
    tree = binary_tree(batch, nodes, device)
    tree.max_depth = nodes.bit_length() - 1
    g = torch.Generator(device).manual_seed(0)
    probs, drawn = (torch.rand(batch, nodes, vocab, generator=g, device=device).pow_(8) for _ in range(2))
    probs, drawn = (p / p.sum(-1, keepdim=True) for p in (probs, drawn))
    uniforms, last = torch.rand(2, batch, nodes, generator=g, device=device)
    choices = tree.tokens.roll(-1, 1)
    with_probs = TokenTree(tree.tokens, tree.parents, draft_probs=drawn, check=False)
    calls: dict[str, tuple[Callable[[], Tensor], int]] = {
        "follow": (lambda: ops.follow(tree, choices), 8 * 4 * batch * nodes),
        "quantile": (lambda: ops.quantile(probs, uniforms), 4 * probs.numel()),
        "choose_drawn": (lambda: ops.choose_drawn(with_probs, probs, uniforms, last), 2 * 4 * probs.numel()),
    }
    # Another order of summation may flip a rejection that is decided by rounding.
    allowed = {"choose_drawn": 0.005}
    return [
        compared_row(
            timer, run, num_bytes, allowed.get(name, 0.0), operation=name, batch=batch, nodes=nodes, vocab=vocab
        )
        for name, (run, num_bytes) in calls.items()
    ]


def time_growth(
    timer: KernelTimer, batch: int, vocab: int, width: int = 10, levels: int = 6, nodes: int = 59
) -> list[dict[str, Any]]:
    """Kernels of EAGLE-2 tree growth: the two of a level, without the drafter's layer, and the final pruning."""
    g = torch.Generator(timer.device).manual_seed(0)
    logits = torch.randn(batch, width, vocab, generator=g, device=timer.device).to(timer.dtype)
    scores = torch.randn(batch, levels * width**2, generator=g, device=timer.device).sort(descending=True).values
    tokens = torch.arange(scores.shape[1], device=timer.device).expand(batch, -1).contiguous()
    parents, level = torch.div(tokens, width, rounding_mode="floor"), scores[:, : width**2].contiguous()
    calls: dict[str, tuple[Callable[[], Tensor], int]] = {
        "top_log_probs": (lambda: ops.top_log_probs(logits, width)[1], logits.numel() * logits.element_size()),
        "next_beam": (lambda: ops.next_beam(level, tokens[:, : width**2], width)[1], 12 * level.numel()),
        "keep_best": (lambda: ops.keep_best(tokens[:, 0], tokens, parents, scores, nodes)[1], 20 * scores.numel()),
    }
    facts = {"batch": batch, "vocab": vocab}
    return [
        compared_row(timer, run, num_bytes, tolerance=1e-4, operation=name, **facts)
        for name, (run, num_bytes) in calls.items()
    ]


def compared_row(
    timer: KernelTimer,
    run: Callable[[], Tensor],
    num_bytes: int,
    differing: float = 0.0,
    tolerance: float = 0.0,
    **facts: Any,
) -> dict[str, Any]:
    """A row with the time of the torch reference too.

    Args:
        differing: allowed share of results that differ from the reference's by more than ``tolerance``.
    """
    output = run()
    with reference_kernels():
        share = float(((output - run()).abs() > tolerance).float().mean())
    assert share <= differing, f"{facts['operation']} differs from its reference"
    row = timer.row(run, num_bytes, **facts)
    with reference_kernels():
        row["plain_us"] = 1e6 * median_seconds(run, timer.device)
    return row


def time_compaction(timer: KernelTimer, shape: Shape, batch: int, nodes: int, slots: int) -> dict[str, Any]:
    """KV compaction of a tree's longest path in all layers."""
    size = (2 * shape.layers, batch, shape.kv_heads, slots, shape.head_dim)
    storage = torch.randn(size, device=timer.device, dtype=timer.dtype)
    tree = binary_tree(batch, nodes, timer.device)
    path = tree.ancestors[0, -1].nonzero().T.expand(batch, -1).contiguous()
    lengths = torch.full((batch,), slots - nodes - 1, device=timer.device)
    start = lengths[:1].clone()
    before = storage.clone()
    ops.compact_kv(storage, path, start, lengths)
    with reference_kernels():
        ops.compact_kv(before, path, start, lengths)
    assert torch.equal(storage[..., :-1, :], before[..., :-1, :]), "compact_kv differs from its reference"
    del before
    # The root's slot does not move.
    num_bytes = 2 * storage.element_size() * storage[:, :, :, 0].numel() * (path.shape[1] - 1)
    facts = {"operation": "compact_kv", "batch": batch, "nodes": nodes, "layers": shape.layers}
    return timer.row(lambda: ops.compact_kv(storage, path, start, lengths), num_bytes, **facts)


class Mamba2Layer:
    """Random inputs of one layer for one tree.

    Args:
        shape: one of ``MAMBA_SHAPES``.
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
        self.window = mamba_ops.conv_window(self.parents, _WIDTH)
        self.channels = randn(batch, nodes, sum(shares), to=dtype)
        x, b, c = self.channels.split(shares, dim=-1)
        self.x = x.unflatten(2, (heads, head_dim))
        self.b, self.c = (t.unflatten(2, (groups, size)) for t in (b, c))
        self.dt = torch.rand(batch, nodes, heads, generator=g).to(device)
        self.a = -torch.linspace(0.5, 16, heads, device=device)
        self.d, self.state = randn(heads), randn(batch, heads, head_dim, size)
        self.conv_state = randn(batch, sum(shares), _WIDTH - 1, to=dtype)
        self.weight, self.bias = randn(sum(shares), _WIDTH, to=dtype), randn(sum(shares), to=dtype)

    def scan(self) -> Tensor:
        return mamba_ops.tree_scan(self.x, self.dt, self.a, self.b, self.c, self.d, self.state, self.tree.ancestors)

    def commit(self) -> None:
        mamba_ops.commit_scan(self.x, self.dt, self.a, self.b, self.state, self.path)

    def convolve(self) -> Tensor:
        return mamba_ops.tree_conv(self.channels, self.conv_state, self.weight, self.bias, self.window)


def time_scans(timer: KernelTimer, name: str, batch: int, nodes: int) -> list[dict[str, Any]]:
    """Tree scan, tree convolution and commit of a Mamba-2 layer; the floor is reading (and writing) its state."""
    layer = Mamba2Layer(batch, nodes, timer.dtype, str(timer.device), MAMBA_SHAPES[name])
    for run in (layer.scan, layer.convolve):
        check_against_reference(run, 1e-3 if timer.dtype == torch.float32 else 2e-2)
    state = layer.state.numel() * layer.state.element_size()
    inputs = layer.channels.numel() * layer.channels.element_size()
    calls = {
        "tree_scan": (layer.scan, state + inputs + 4 * layer.x.numel()),
        "tree_conv": (layer.convolve, 2 * inputs),
        "commit_scan": (layer.commit, 2 * state),
    }
    return [
        timer.row(run, num_bytes, operation=what, shape=name, batch=batch, nodes=nodes)
        for what, (run, num_bytes) in calls.items()
    ]
