"""Timing of a decode step's kernels against their memory floor, for ``mmspec.eval.gpu``.

A kernel's floor is the bytes that it must read and write over the bandwidth of a large copy on the same device. Many
calls over as many buffers are one CUDA graph: launches then cost nothing, and no call finds its inputs in the L2 cache.
Every kernel is compared with its torch reference in float32 before it is timed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter as clock
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmspec import ops
from mmspec.core.tree import TokenTree
from mmspec.eval.scale_up.models import Shape
from mmspec.ssm import ops as mamba_ops

MAMBA_SHAPES = {
    "small": dict(heads=8, head_dim=64, groups=1, state=64),
    "bamba": dict(heads=128, head_dim=64, groups=1, state=128),
    "nemotron": dict(heads=128, head_dim=64, groups=8, state=128),
}
"""Layers of about tiny-hybrid's size, of Bamba-9B and of Nemotron-H-8B."""

_WIDTH = 4  # of the convolution
_REPLAYS = 20  # of a graph that is timed
_BUFFER_BYTES = 6 << 30  # most memory of the inputs of a graph's calls
TOLERANCE = 1e-2
"""Allowed norm of the difference to the float32 reference, relative to the reference's."""


def device_seconds(run: Callable[[], Any], device: torch.device, count: int, warm_up: int = 3) -> list[float]:
    """Seconds of each of ``count`` calls in succession: between events on a GPU, else by the host's clock."""
    for _ in range(warm_up):
        run()
    if device.type != "cuda":
        marks = [clock()]
        for _ in range(count):
            run()
            marks.append(clock())
        return [end - start for start, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1000 for start, end in pairwise(events)]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy larger than all caches."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 22), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(device_seconds(lambda: target.copy_(source), device, _REPLAYS))


def call_seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Median time of one of several calls, which on a GPU are captured as one graph."""
    if device.type != "cuda":
        return statistics.median(device_seconds(lambda: [call() for call in calls], device, 3, 1)) / len(calls)
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return statistics.median(device_seconds(graph.replay, device, _REPLAYS)) / len(calls)


def reference_kernels() -> Any:
    """A context in which the torch reference of every operation runs."""
    return mock.patch.dict(os.environ, {"MMSPEC_KERNELS": "reference"})


def binary_tree(batch: int, nodes: int, device: torch.device) -> TokenTree:
    """A binary tree in which node i has the parent (i - 1) // 2 and the token i."""
    index = torch.arange(nodes, device=device).expand(batch, -1)
    return TokenTree(index, (index - 1).div(2, rounding_mode="floor"), check=False)


def last_path(batch: int, nodes: int, device: torch.device) -> Tensor:
    """The path to a binary tree's last node, a longest one, (batch, depth) int64."""
    path = [nodes - 1]
    while path[0]:
        path.insert(0, (path[0] - 1) // 2)
    return torch.tensor(path, dtype=torch.long, device=device).expand(batch, -1).contiguous()


class Inputs:
    """Random inputs of one call.

    Args:
        exact: float32 tensors of the same values, for the reference.
    """

    def __init__(self, timer: KernelTimer, seed: int = 0, exact: bool = False) -> None:
        self.device, self._dtype, self._exact = timer.device, timer.dtype, exact
        self.generator = torch.Generator(timer.device).manual_seed(seed)

    def randn(self, *size: int) -> Tensor:
        """In the kernels' dtype."""
        values = torch.randn(size, dtype=torch.float32, generator=self.generator, device=self.device).to(self._dtype)
        return values.float() if self._exact else values

    def rand(self, *size: int) -> Tensor:
        """Uniform in [0, 1), float32."""
        return torch.rand(size, dtype=torch.float32, generator=self.generator, device=self.device)


Make = Callable[[Inputs], Callable[[], Tensor]]
"""A call of a kernel on inputs of its own."""


@dataclass(frozen=True)
class KernelTimer:
    """Checks and times kernels.

    Attributes:
        device: to run on.
        bandwidth: of the device's memory, in bytes per second.
        dtype: of the kernels' inputs.
        count: calls of a graph, fewer where their inputs would take too much memory.
    """

    device: torch.device
    bandwidth: float
    dtype: torch.dtype
    count: int = 32

    def seconds(self, make: Make, input_bytes: int) -> float:
        """Time of a call.

        Args:
            input_bytes: memory of a call's inputs and results.
        """
        count = max(1, min(self.count, _BUFFER_BYTES // input_bytes))
        return call_seconds([make(Inputs(self, seed)) for seed in range(count)], self.device)

    def row(
        self, make: Make, num_bytes: int, *, differing: float | None = None, memory: float = 1.0, **facts: Any
    ) -> dict[str, Any]:
        """Compare a kernel with its reference, and time it.

        Args:
            num_bytes: that a call must read and write.
            differing: allowed share of other choices, of a kernel that returns tokens or nodes: where sums decide,
                their order may. None compares by norm.
            memory: bytes of a call's tensors, in units of ``num_bytes``.
            **facts: more fields of the row.

        Returns:
            ``facts``; ``error``, see ``difference``; microseconds of a call, of its floor, and their ratio.

        Raises:
            AssertionError: the results differ.
        """
        output = make(Inputs(self))()
        with reference_kernels():
            error = difference(output, make(Inputs(self, exact=True))(), choices=differing is not None)
        allowed = TOLERANCE if differing is None else differing
        assert error <= allowed, f"{facts['operation']} differs from its reference by {error:.2g}, more than {allowed}"
        seconds, floor = self.seconds(make, int(memory * num_bytes) + 1), num_bytes / self.bandwidth
        return {**facts, "error": error, "us": 1e6 * seconds, "floor_us": 1e6 * floor, "over_floor": seconds / floor}


def difference(output: Tensor, reference: Tensor, choices: bool) -> float:
    """Share of other choices, or the norm of the difference relative to the reference's."""
    if choices:
        return float((output != reference).float().mean())
    exact = reference.float()
    return float((output.float() - exact).norm() / exact.norm())


def attention_row(timer: KernelTimer, name: str, shape: Shape, batch: int, prefix: int, nodes: int) -> dict[str, Any]:
    """Tree attention of one layer."""
    slots = prefix + nodes
    mask = binary_tree(batch, nodes, timer.device).ancestors.contiguous()
    lengths = torch.full((batch,), prefix, dtype=torch.long, device=timer.device)

    def attention(inputs: Inputs) -> Callable[[], Tensor]:
        query = inputs.randn(batch, shape.heads, nodes, shape.head_dim)
        key, value = inputs.randn(2, batch, shape.kv_heads, slots, shape.head_dim)
        return lambda: ops.tree_attention(query, key, value, lengths, mask, start=lengths[:1])

    num_bytes = timer.dtype.itemsize * batch * shape.head_dim * 2 * (shape.kv_heads * slots + shape.heads * nodes)
    facts: dict[str, Any] = {"shape": name, "batch": batch, "prefix": prefix, "nodes": nodes}
    return timer.row(attention, num_bytes, operation="tree attention", **facts)


def verification_rows(timer: KernelTimer, batch: int, nodes: int, vocab: int) -> Iterator[dict[str, Any]]:
    """Longest accepted path, sampling at every node, and rejection sampling of drawn trees."""
    tree = binary_tree(batch, nodes, timer.device)
    tree.max_depth = nodes.bit_length() - 1
    choices = tree.tokens.roll(-1, 1)

    def probs(inputs: Inputs) -> Tensor:
        weights = inputs.rand(batch, nodes, vocab).pow_(8)
        return weights.div_(weights.sum(-1, keepdim=True))

    def follow(inputs: Inputs) -> Callable[[], Tensor]:
        chosen = choices.clone()
        return lambda: ops.accepted_path(tree, chosen)

    def quantile(inputs: Inputs) -> Callable[[], Tensor]:
        p, uniforms = probs(inputs), inputs.rand(batch, nodes)
        return lambda: ops.quantile(p, uniforms)

    def choose_drawn(inputs: Inputs) -> Callable[[], Tensor]:
        p, chances, last = probs(inputs), *inputs.rand(2, batch, nodes)
        drawn = TokenTree(tree.tokens, tree.parents, draft_probs=probs(inputs), check=False)
        return lambda: ops.choose_drawn(drawn, p, chances, last)

    size = 4 * batch * nodes * vocab
    facts = {"batch": batch, "nodes": nodes, "vocab": vocab}
    yield timer.row(follow, 8 * 4 * batch * nodes, differing=0.0, operation="follow", **facts)
    yield timer.row(quantile, size, differing=0.005, operation="quantile", **facts)
    yield timer.row(choose_drawn, 2 * size, differing=0.005, memory=3.0, operation="choose_drawn", **facts)


def growth_rows(
    timer: KernelTimer, batch: int, vocab: int, width: int = 10, levels: int = 6, nodes: int = 59
) -> Iterator[dict[str, Any]]:
    """EAGLE-2 tree growth: the two kernels of a level, without the drafter's layer, and the final pruning."""
    tokens = torch.arange(levels * width**2, device=timer.device).expand(batch, -1).contiguous()
    places = tokens[:, 1 : 1 + (levels - 1) * width].contiguous()

    def top_log_probs(inputs: Inputs) -> Callable[[], Tensor]:
        logits = inputs.randn(batch, width, vocab)
        return lambda: ops.top_log_probs(logits, width)[1]

    def scores(inputs: Inputs) -> Tensor:
        return inputs.rand(*tokens.shape).sort(descending=True).values

    def next_beam(inputs: Inputs) -> Callable[[], Tensor]:
        level, ids = (x[:, : width**2].reshape(batch, width, width) for x in (scores(inputs), tokens))
        return lambda: ops.next_beam(None, level, ids, width)[1].places

    def keep_best(inputs: Inputs) -> Callable[[], Tensor]:
        order = scores(inputs)
        return lambda: ops.keep_best(tokens[:, 0], tokens, places, width, order, nodes)[1]

    logits_bytes = timer.dtype.itemsize * batch * width * vocab
    facts = {"batch": batch, "vocab": vocab}
    yield timer.row(top_log_probs, logits_bytes, operation="top_log_probs", **facts)
    yield timer.row(next_beam, 12 * batch * width**2, differing=0.0, operation="next_beam", **facts)
    yield timer.row(keep_best, 20 * tokens.numel(), differing=0.0, operation="keep_best", **facts)


def compaction_row(timer: KernelTimer, shape: Shape, batch: int, nodes: int, slots: int = 1024) -> dict[str, Any]:
    """KV compaction of a tree's longest path in all layers."""
    path = last_path(batch, nodes, timer.device)
    lengths = torch.full((batch,), slots - nodes - 1, dtype=torch.long, device=timer.device)

    def compact(inputs: Inputs) -> Callable[[], Tensor]:
        storage = inputs.randn(2 * shape.layers, batch, shape.kv_heads, slots, shape.head_dim)

        def run() -> Tensor:
            ops.compact_kv(storage, path, lengths[:1], lengths)
            return storage[..., :-1, :]  # the last slot is a write sink

        return run

    moved = 2 * shape.layers * batch * shape.kv_heads * shape.head_dim * timer.dtype.itemsize
    num_bytes = 2 * moved * (path.shape[1] - 1)  # the root's slot does not move
    return timer.row(
        compact, num_bytes, memory=slots * moved / num_bytes, operation="compact_kv", batch=batch, nodes=nodes
    )


def scan_rows(timer: KernelTimer, name: str, batch: int, nodes: int) -> Iterator[dict[str, Any]]:
    """Tree scan, tree convolution and commit of a Mamba-2 layer; the floor is reading (and writing) its state.

    Args:
        name: one of ``MAMBA_SHAPES``.
    """
    heads, head_dim, groups, size = (MAMBA_SHAPES[name][part] for part in ("heads", "head_dim", "groups", "state"))
    shares = [heads * head_dim, groups * size, groups * size]
    tree = binary_tree(batch, nodes, timer.device)
    path = last_path(batch, nodes, timer.device)
    window = mamba_ops.conv_window(tree.parents, _WIDTH)
    a = -torch.linspace(0.5, 16, heads, dtype=torch.float32, device=timer.device)

    def projected(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x, step sizes, B, C and the state before the tree."""
        x, b, c = inputs.randn(batch, nodes, sum(shares)).split(shares, dim=-1)
        b, c = (t.unflatten(2, (groups, size)) for t in (b, c))
        state = inputs.randn(batch, heads, head_dim, size).float()
        return x.unflatten(2, (heads, head_dim)), inputs.rand(batch, nodes, heads), b, c, state

    def tree_scan(inputs: Inputs) -> Callable[[], Tensor]:
        x, dt, b, c, state = projected(inputs)
        d = inputs.randn(heads).float()
        return lambda: mamba_ops.tree_scan(x, dt, a, b, c, d, state, tree.ancestors)

    def tree_conv(inputs: Inputs) -> Callable[[], Tensor]:
        channels, state = inputs.randn(batch, nodes, sum(shares)), inputs.randn(batch, sum(shares), _WIDTH - 1)
        weight, bias = inputs.randn(sum(shares), _WIDTH), inputs.randn(sum(shares))
        return lambda: mamba_ops.tree_conv(channels, state, weight, bias, window)

    def commit_scan(inputs: Inputs) -> Callable[[], Tensor]:
        x, dt, b, _, state = projected(inputs)

        def run() -> Tensor:
            mamba_ops.commit_scan(x, dt, a, b, state, path)
            return state

        return run

    state, channels = 4 * batch * heads * head_dim * size, timer.dtype.itemsize * batch * nodes * sum(shares)
    facts: dict[str, Any] = {"shape": name, "batch": batch, "nodes": nodes}
    yield timer.row(tree_scan, state + channels + 4 * batch * nodes * heads * head_dim, operation="tree_scan", **facts)
    yield timer.row(tree_conv, 2 * channels, operation="tree_conv", **facts)
    yield timer.row(commit_scan, 2 * state, operation="commit_scan", **facts)
