"""Kernels of a decode step against their memory floor, for ``mmspec.eval.gpu``: the bytes that a kernel must read and
write over the bandwidth of a large copy. Kernels that wait for no memory are timed as parts of drafts and passes only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmspec import ops
from mmspec.core.tree import TokenTree
from mmspec.engine.stats import mark, seconds
from mmspec.ssm import ops as mamba_ops

Kernel = tuple[str, Callable[..., Tensor], list[Any], int, float]
"""Name; call; sizes of its tensors: random numbers (tuples), or positive float32 numbers that nearly add up to 1 along
the last axis (lists); bytes that it must read and write; tolerance (``measure``)."""

_BUFFER_BYTES = 6 << 30  # most memory of the inputs of a graph's calls


def device_seconds(run: Callable[[], Any], device: torch.device, count: int = 20) -> list[float]:
    """Seconds of each of ``count`` calls in succession, after three that warm up."""
    for _ in range(3):
        run()
    marks = [mark(device)]
    for _ in range(count):
        run()
        marks.append(mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [seconds(start, end) for start, end in pairwise(marks)]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy larger than all caches."""
    source = torch.ones(1 << (30 if device.type == "cuda" else 22), dtype=torch.uint8, device=device)
    return 2 * source.numel() / median(device_seconds(partial(torch.empty_like(source).copy_, source), device))


def call_seconds(calls: list[Callable[[], Any]], device: torch.device) -> float:
    """Median time of a call: all are one CUDA graph, so that launches cost nothing and no call finds its inputs in the
    L2 cache."""
    run: Callable[[], Any] = lambda: [call() for call in calls]  # noqa: E731
    if device.type == "cuda":
        run()  # compiles
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    return median(device_seconds(run, device)) / len(calls)


def measure(kernel: Kernel, device: torch.device, dtype: torch.dtype, bandwidth: float, calls: int) -> dict[str, Any]:
    """Compare a kernel with its torch reference in float32, and time it by ``calls`` calls.

    Raises:
        AssertionError: floats differ by more than the tolerance (norm of the difference over the reference's), or more
            than this share of tokens: where sums decide, their order may.
    """
    name, call, sizes, num_bytes, tolerance = kernel

    def inputs(seed: int = 0, exact: bool = False) -> list[Tensor]:
        generator, made = torch.Generator(device).manual_seed(seed), []
        for size in sizes:
            x = torch.randn(size, dtype=torch.float32, generator=generator, device=device)
            numbers = x.to(dtype).float() if exact else x.to(dtype)
            made.append(numbers if isinstance(size, tuple) else x.pow_(8).div_(1.001 * x.sum(-1, keepdim=True)))
        return made

    output = call(*inputs())
    with mock.patch.dict(os.environ, {"MMSPEC_KERNELS": "reference"}):
        expected = call(*inputs(exact=True))
    if expected.is_floating_point():
        error = float((output.float() - expected.float()).norm() / expected.float().norm())
    else:
        error = float((output != expected).float().mean())
    assert error <= tolerance, f"{name} differs from its reference by {error:.2g}, more than {tolerance}"
    seeds = range(max(1, min(calls, _BUFFER_BYTES // sum(x.nbytes for x in inputs()))))
    spent, floor = call_seconds([partial(call, *inputs(seed)) for seed in seeds], device), num_bytes / bandwidth
    return {"kernel": name, "error": error, "us": 1e6 * spent, "floor_us": 1e6 * floor, "over_floor": spent / floor}


def kernels(config: Any, batch: int, prefix: int, nodes: int, device: torch.device, size: int) -> Iterator[Kernel]:
    """Kernels of a step over binary trees after a prefix, with numbers of ``size`` bytes; for a model with Mamba-2
    layers, of attention and of these layers."""
    heads, kv_heads, vocab = config.num_attention_heads, config.num_key_value_heads, config.vocab_size
    head_dim, slots, count = config.hidden_size // heads, prefix + nodes, batch * nodes
    index = torch.arange(nodes, device=device).repeat(batch, 1)
    tree = TokenTree(index, (index - 1).div(2, rounding_mode="floor"), check=False)
    mask, lengths = tree.ancestors.contiguous(), torch.full((batch,), prefix, dtype=torch.long, device=device)
    longest = [nodes - 1]  # the path to the last node
    while longest[0]:
        longest.insert(0, (longest[0] - 1) // 2)
    path = torch.tensor(longest, dtype=torch.long, device=device).repeat(batch, 1)

    def attention(q: Tensor, kv: Tensor) -> Tensor:
        return ops.tree_attention(q, kv[0], kv[1], lengths, mask, start=lengths[:1])

    def compact_kv(storage: Tensor) -> Tensor:
        ops.compact_kv(storage, path, lengths[:1], lengths)
        return storage[..., :-1, :]  # the last slot is a write sink

    read = size * batch * head_dim * 2 * (kv_heads * slots + heads * nodes)
    kv = 2, batch, kv_heads, slots, head_dim
    yield "tree_attention", attention, [(batch, heads, nodes, head_dim), kv], read, 1e-2
    if config.model_type != "bamba":
        stored = 2 * config.num_hidden_layers, batch, kv_heads, slots + 1, head_dim
        moved = size * stored[0] * batch * kv_heads * head_dim * max(len(longest) - 1, 1)  # the root's slot stays
        yield "compact_kv", compact_kv, [stored], 2 * moved, 1e-2
        yield "quantile", ops.quantile, [[batch, nodes, vocab], [batch, nodes]], 4 * count * vocab, 5e-3
        top_log_probs = lambda x: ops.top_log_probs(x, 10)[1]  # noqa: E731
        yield "top_log_probs", top_log_probs, [(batch, 10, vocab)], size * batch * 10 * vocab, 1e-2
        return
    mamba, state = config.mamba_n_heads, (config.mamba_n_groups, config.mamba_d_state)
    inner, shared, taps = mamba * config.mamba_d_head, state[0] * state[1], config.mamba_d_conv
    channels, window = inner + 2 * shared, mamba_ops.conv_window(tree.parents, taps)
    a = -torch.linspace(0.5, 16, mamba, dtype=torch.float32, device=device)

    def scan(xbc: Tensor, dt: Tensor, before: Tensor, commits: bool = False) -> Tensor:
        x, b, c = xbc.split([inner, shared, shared], dim=-1)
        x, b, c = x.unflatten(2, (mamba, -1)), b.unflatten(2, state), c.unflatten(2, state)
        if not commits:
            return mamba_ops.tree_scan(x, dt, a, b, c, a, before, tree.ancestors)
        mamba_ops.commit_scan(x, dt, a, b, before, path)
        return before

    sizes: list[Any] = [(batch, nodes, channels), [batch, nodes, mamba], [batch, mamba, inner // mamba, state[1]]]
    states, read = 4 * batch * inner * state[1], size * count * channels
    yield "tree_scan", scan, sizes, states + read + 4 * count * inner, 1e-2
    yield "commit_scan", partial(scan, commits=True), sizes, 2 * states, 1e-2
    tree_conv = lambda x, before, weight, bias: mamba_ops.tree_conv(x, before, weight, bias, window)  # noqa: E731
    sizes = [(batch, nodes, channels), (batch, channels, taps - 1), (channels, taps), (channels,)]
    yield "tree_conv", tree_conv, sizes, 2 * read, 1e-2
