"""The kernels of a step, each against its floor and against what stands in its place elsewhere; for `eval.gpu`.

A floor is the bytes that must be read and written over the bandwidth of a large copy, measured on the same device.
Every operation is checked against its plain torch form before it is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eval.scale_up.axes import Shape
from eval.ssm_ops import SHAPES as MAMBA_SHAPES
from eval.ssm_ops import Layer
from mmspec import ops
from mmspec.tree import TokenTree

_ROUNDS = 5  # on a CPU, where times are only there to try the flow


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """A call's time, the median of many; caches of the device are cold before each."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=20, rep=80, return_mode="median") / 1000
    times = []
    for _ in range(_ROUNDS):
        start = clock()
        run()
        times.append(clock() - start)
    return median(times)


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy that no cache holds, read and written bytes counted."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 22), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device)


@contextmanager
def plainly() -> Iterator[None]:
    """The plain torch form of every operation."""
    before = os.environ.get("MMSPEC_KERNELS")
    os.environ["MMSPEC_KERNELS"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MMSPEC_KERNELS"]
        else:
            os.environ["MMSPEC_KERNELS"] = before


def agree(run: Callable[[], Tensor], tolerance: float = 0.0) -> None:
    """The operation gives what its plain form gives.

    Raises:
        AssertionError: it does not.
    """
    ours = run()
    with plainly():
        torch.testing.assert_close(ours, run(), atol=tolerance, rtol=tolerance)


def binary_tree(batch: int, nodes: int, device: torch.device) -> TokenTree:
    """Node i hangs on node (i - 1) // 2; tokens number the nodes."""
    index = torch.arange(nodes, device=device).expand(batch, -1)
    return TokenTree(index, (index - 1).div(2, rounding_mode="floor"), check=False)


@dataclass(frozen=True)
class Place:
    """Where and how kernels are measured: the device, its bandwidth in bytes per second, and the precision."""

    device: torch.device
    bandwidth: float
    dtype: torch.dtype

    def row(self, run: Callable[[], Any], least: int, **facts: Any) -> dict[str, Any]:
        """A row of a table: microseconds of a call, of its floor, and their ratio."""
        taken, floor = seconds(run, self.device), least / self.bandwidth
        return {**facts, "us": 1e6 * taken, "floor_us": 1e6 * floor, "over_floor": taken / floor}


# ---------------------------------------------------------------------- attention


def attention(place: Place, shape: Shape, batch: int, prefix: int, nodes: int, flex: bool) -> dict[str, Any]:
    """Attention of a tree's nodes in one layer: ours, torch's with keys and values repeated, and flex attention, which
    is compiled first and only where asked for."""
    g = torch.Generator(place.device).manual_seed(0)

    def numbers(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, shape.head_dim, generator=g, device=place.device, dtype=place.dtype)

    query, slots = numbers(shape.heads, nodes), prefix + nodes
    key, value = numbers(shape.kv_heads, slots), numbers(shape.kv_heads, slots)
    tree = binary_tree(batch, nodes, place.device)
    begin = torch.zeros(batch, dtype=torch.long, device=place.device)
    end, start = begin + prefix, begin[:1] + prefix
    mask = tree.ancestors.contiguous()
    full = torch.cat([mask.new_ones(batch, nodes, prefix), mask], dim=2)[:, None]
    group = shape.heads // shape.kv_heads

    def ours() -> Tensor:
        return ops.tree_attention(query, key, value, begin, end, mask, start=start)

    def repeated() -> Tensor:
        keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value)) if group > 1 else (key, value)
        return F.scaled_dot_product_attention(query, keys, values, full).transpose(1, 2)

    agree(ours, 2e-2)
    torch.testing.assert_close(ours(), repeated(), atol=2e-2, rtol=2e-2)
    size = query.element_size()
    least = size * (key.numel() + value.numel() + 2 * query.numel())
    facts = {"batch": batch, "prefix": prefix, "nodes": nodes, "heads": shape.heads, "kv_heads": shape.kv_heads}
    row = place.row(ours, least, **facts)
    row["sdpa_us"] = 1e6 * seconds(repeated, place.device)
    row["flex_us"] = _flex(place, query, key, value, full) if flex and place.device.type == "cuda" else None
    return row


def _flex(place: Place, query: Tensor, key: Tensor, value: Tensor, full: Tensor) -> float | str:
    """Microseconds of flex attention under the same mask; the reason where it does not run."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    try:
        allowed = full[:, 0]
        blocks = create_block_mask(
            lambda b, h, i, j: allowed[b, i, j],
            B=full.shape[0],
            H=None,
            Q_LEN=full.shape[2],
            KV_LEN=full.shape[3],
            device=place.device,
        )
        run = torch.compile(flex_attention, dynamic=False)
        grouped = query.shape[1] != key.shape[1]
        call = lambda: run(query, key, value, block_mask=blocks, enable_gqa=grouped)  # noqa: E731
        torch.testing.assert_close(
            call(), F.scaled_dot_product_attention(query, key, value, full, enable_gqa=True), atol=2e-2, rtol=2e-2
        )
        return 1e6 * seconds(call, place.device)
    except Exception as error:  # whatever a compiler says, ours was measured
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__


# ---------------------------------------------------------------------- the rest of a step


def verification(place: Place, batch: int, nodes: int, vocab: int) -> list[dict[str, Any]]:
    """Following a path, drawing after every node, and rejection sampling of drawn trees."""
    device = place.device
    tree = binary_tree(batch, nodes, device)
    tree.max_depth = nodes.bit_length() - 1
    g = torch.Generator(device).manual_seed(0)
    probs, drawn = (torch.rand(batch, nodes, vocab, generator=g, device=device).pow_(8) for _ in range(2))
    probs, drawn = (p / p.sum(-1, keepdim=True) for p in (probs, drawn))
    numbers, last = torch.rand(2, batch, nodes, generator=g, device=device)
    choices = tree.tokens.roll(-1, 1)
    with_probs = TokenTree(tree.tokens, tree.parents, draft_probs=drawn, check=False)
    calls: dict[str, tuple[Callable[[], Tensor], int]] = {
        "follow": (lambda: ops.follow(tree, choices), 8 * 4 * batch * nodes),
        "quantile": (lambda: ops.quantile(probs, numbers), 4 * probs.numel()),
        "choose_drawn": (lambda: ops.choose_drawn(with_probs, probs, numbers, last), 2 * 4 * probs.numel()),
    }
    # Another order of sums may decide a rejection that hangs on the last digit.
    allowed = {"choose_drawn": 0.005}
    return [
        compared(place, run, least, allowed.get(name, 0.0), operation=name, batch=batch, nodes=nodes, vocab=vocab)
        for name, (run, least) in calls.items()
    ]


def growing(
    place: Place, batch: int, vocab: int, width: int = 10, levels: int = 6, nodes: int = 59
) -> list[dict[str, Any]]:
    """What a level of an EAGLE-2 tree takes beside the drafter's layer, and cutting the tree to its size."""
    g = torch.Generator(place.device).manual_seed(0)
    logits = torch.randn(batch, width, vocab, generator=g, device=place.device).to(place.dtype)
    scores = torch.randn(batch, levels * width**2, generator=g, device=place.device).sort(descending=True).values
    tokens = torch.arange(scores.shape[1], device=place.device).expand(batch, -1).contiguous()
    parents, level = torch.div(tokens, width, rounding_mode="floor"), scores[:, : width**2].contiguous()
    calls: dict[str, tuple[Callable[[], Tensor], int]] = {
        "top_log_probs": (lambda: ops.top_log_probs(logits, width)[1], logits.numel() * logits.element_size()),
        "next_beam": (lambda: ops.next_beam(level, tokens[:, : width**2], width)[1], 12 * level.numel()),
        "keep_best": (lambda: ops.keep_best(tokens[:, 0], tokens, parents, scores, nodes)[1], 20 * scores.numel()),
    }
    facts = {"batch": batch, "vocab": vocab}
    return [
        compared(place, run, least, tolerance=1e-4, operation=name, **facts) for name, (run, least) in calls.items()
    ]


def compared(
    place: Place, run: Callable[[], Tensor], least: int, differing: float = 0.0, tolerance: float = 0.0, **facts: Any
) -> dict[str, Any]:
    """A row of a table with the time of the plain form beside ours, which gives the same but for a share."""
    ours = run()
    with plainly():
        share = float(((ours - run()).abs() > tolerance).float().mean())
    assert share <= differing, f"{facts['operation']} differs from its plain form"
    row = place.row(run, least, **facts)
    with plainly():
        row["plain_us"] = 1e6 * seconds(run, place.device)
    return row


def compaction(place: Place, shape: Shape, batch: int, nodes: int, slots: int) -> dict[str, Any]:
    """Moving the longest path of a tree, in all layers."""
    size = (2 * shape.layers, batch, shape.kv_heads, slots, shape.head_dim)
    storage = torch.randn(size, device=place.device, dtype=place.dtype)
    tree = binary_tree(batch, nodes, place.device)
    path = tree.ancestors[0, -1].nonzero().T.expand(batch, -1).contiguous()
    ends = torch.full((batch,), slots - nodes - 1, device=place.device)
    start = ends[:1].clone()
    before = storage.clone()
    ops.compact_kv(storage, path, start, ends)
    with plainly():
        ops.compact_kv(before, path, start, ends)
    assert torch.equal(storage[..., :-1, :], before[..., :-1, :]), "the kernel must move what its plain form moves"
    del before
    # The root stays where it is.
    least = 2 * storage.element_size() * storage[:, :, :, 0].numel() * (path.shape[1] - 1)
    facts = {"operation": "compact_kv", "batch": batch, "nodes": nodes, "layers": shape.layers}
    return place.row(lambda: ops.compact_kv(storage, path, start, ends), least, **facts)


def scans(place: Place, name: str, batch: int, nodes: int) -> list[dict[str, Any]]:
    """Scan, convolution and commit of a Mamba-2 layer over a tree; the floor is reading (and writing) its state."""
    layer = Layer(batch, nodes, place.dtype, str(place.device), MAMBA_SHAPES[name])
    layer.check()
    state = layer.state.numel() * layer.state.element_size()
    inputs = layer.channels.numel() * layer.channels.element_size()
    calls = {
        "tree_scan": (layer.scan, state + inputs + 4 * layer.x.numel()),
        "tree_conv": (layer.convolve, 2 * inputs),
        "commit_scan": (layer.commit, 2 * state),
    }
    return [
        place.row(run, least, operation=what, shape=name, batch=batch, nodes=nodes)
        for what, (run, least) in calls.items()
    ]
