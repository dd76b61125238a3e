"""One grid of awkward cases for every implementation of ``mmspec.ops``, compared with plain loops.

``python -m tests.mmspec.ops.ops_grid`` runs it on a CPU with the implementation that ``MMSPEC_KERNELS`` names. The
Triton kernels need ``TRITON_INTERPRET=1`` from the start of the process for that, so tests run them in one of their
own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter as clock
from unittest.mock import patch

import torch
from torch import Tensor

from mmspec import TokenTree, ops
from tests.interpreter import mend_interpreter
from tests.mmspec.ops.verify_grid import EXACT, PEAKED, check_exact, check_peaked, check_tiny_shares
from tests.tiny import random_tree, root_path, valid_nodes

# ---------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Attention:
    """One shape.

    Attributes:
        prefix: committed slots of the first row; later rows have fewer.
        earlier: nodes forwarded before the tree's, which only some nodes attend to.
        free: slots after the tail, as in a buffer of fixed size; ``start`` is then passed.
        value_dim: of the values; None is that of the keys.
        window, softcap: of the attention.
    """

    nodes: int
    prefix: int
    shape: str = "random"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    earlier: int = 0
    free: int = 0
    window: int | None = None
    softcap: float | None = None


ATTENTION = [
    Attention(1, 1),
    Attention(1, 17, batch=3, heads=7, kv_heads=1, head_dim=128, dtype=torch.bfloat16),
    Attention(1, 700, heads=4, kv_heads=1),
    Attention(3, 130, "chain", heads=8, kv_heads=2, head_dim=80),
    Attention(3, 17, batch=2, head_dim=96, dtype=torch.float16, earlier=5),
    Attention(60, 17, heads=2, kv_heads=1, head_dim=128, dtype=torch.bfloat16),
    Attention(60, 400, heads=2, kv_heads=1, head_dim=80, batch=2, free=9),
    Attention(63, 130, "star", heads=4, kv_heads=1),
    Attention(63, 1, "chain", batch=2, head_dim=24),
    Attention(16, 10, batch=2, window=20, heads=4),
    Attention(16, 200, batch=2, window=20, heads=4),
    Attention(20, 300, "chain", window=8, earlier=3, softcap=5.0, free=70),
    Attention(5, 260, batch=3, heads=4, kv_heads=4, softcap=2.0, dtype=torch.bfloat16, free=3),
    Attention(9, 140, batch=1, heads=2, kv_heads=1, head_dim=256, dtype=torch.float16),
    Attention(128, 66, heads=1, kv_heads=1, head_dim=16, window=1000),
    Attention(1, 300, heads=4, kv_heads=2, head_dim=192, value_dim=128, dtype=torch.bfloat16),
    Attention(33, 200, batch=2, head_dim=24, value_dim=10, free=5),
    Attention(9, 140, "chain", heads=2, kv_heads=1, head_dim=40, value_dim=70, window=20, softcap=3.0, earlier=2),
]


def check_attention(case: Attention, device: str = "cpu") -> None:
    """Every node of every head against a softmax over the slots that a loop finds."""
    g = torch.Generator().manual_seed(case.nodes + case.prefix)
    lengths = torch.tensor([max(case.prefix - 2 * b, 0) for b in range(case.batch)], dtype=torch.int32)
    tree = random_tree(g, case.batch, case.nodes, 999, shape=case.shape, ragged=False)
    mask = torch.rand(case.batch, case.nodes, case.earlier, generator=g) < 0.5
    mask = torch.cat([mask, tree.ancestors], dim=2)
    slots = case.prefix + mask.shape[2] + case.free
    query = torch.randn(case.batch, case.nodes, case.heads, case.head_dim, generator=g).to(case.dtype).transpose(1, 2)
    # A view into a larger buffer, as a layer's part of the cache is; slots that must not be read are NaN.
    widths = case.head_dim, case.value_dim or case.head_dim
    shape = (case.batch, case.kv_heads, slots + 3)
    buffers = [torch.full((*shape, width), torch.nan, dtype=case.dtype) for width in widths]
    attended: list[list[list[int]]] = []
    for b in range(case.batch):
        rows = []
        for i in range(case.nodes):
            nearest = int(lengths[b] + tree.depth[b, i]) - (case.window or 10**9)
            prefix = [s for s in range(int(lengths[b])) if s > nearest]
            rows.append(prefix + [case.prefix + j for j in mask[b, i].nonzero().flatten().tolist()])
        attended.append(rows)
        # Slots outside of a node's window are read too, and must be finite.
        written = [*range(int(lengths[b])), *range(case.prefix, case.prefix + mask.shape[2])]
        for buffer in buffers:
            numbers = torch.randn(case.kv_heads, len(written), buffer.shape[3], generator=g)
            buffer[b, :, written] = numbers.to(case.dtype)
    key, value = (buffer[:, :, :slots] for buffer in buffers)
    start = torch.tensor([case.prefix]) if case.free else None
    if case.window is not None:
        key_read, value_read = key.clone(), value.clone()
        for b in range(case.batch):  # slots before every window are never read
            key_read[b, :, : max(int(lengths[b]) - case.window + 1, 0)] = torch.nan
            value_read[b, :, : max(int(lengths[b]) - case.window + 1, 0)] = torch.nan
        key, value = key_read, value_read

    def on(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(device)

    with patch("torch.empty", _nan_filled), patch("torch.Tensor.new_empty", _new_nan_filled):
        read = ops.tree_attention(
            *map(on, (query, key, value, lengths, mask)),  # type: ignore[arg-type]
            scale=0.2,
            start=on(start),
            depth=on(tree.depth) if case.window else None,
            window=case.window,
            softcap=case.softcap,
        )
    assert read.shape == (case.batch, case.nodes, case.heads, widths[1])
    assert read.dtype == case.dtype
    allowed = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[case.dtype]
    for b in range(case.batch):
        for i in range(case.nodes):
            expected = _softmax(query[b, :, i].double(), key[b].double(), value[b].double(), attended[b][i], case)
            torch.testing.assert_close(read[b, i].cpu().double(), expected, rtol=allowed, atol=allowed)


def _softmax(q: Tensor, k: Tensor, v: Tensor, slots: list[int], case: Attention) -> Tensor:
    """(heads, head_dim) for one node: (heads, head_dim) queries, (kv_heads, slots, head_dim) keys and values."""
    group = case.heads // case.kv_heads
    read = []
    for head in range(case.heads):
        scores = k[head // group][slots] @ q[head] * 0.2
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        read.append(scores.softmax(0) @ v[head // group][slots])
    return torch.stack(read)


# ---------------------------------------------------------------------- verification


@dataclass(frozen=True)
class Tree:
    """One shape of trees; ``sharp`` is how unlike target and drafter are."""

    nodes: int
    shape: str = "random"
    batch: int = 1
    vocab: int = 11
    sharp: float = 1.0
    dtype: torch.dtype = torch.float32


TREES = [
    Tree(1),
    Tree(1, batch=3, vocab=5000),
    Tree(3, "star", batch=4),
    Tree(7, "chain", batch=2, vocab=130),
    Tree(13, batch=5, sharp=0.3),
    Tree(60, vocab=70, sharp=3.0),
    Tree(63, "star", vocab=4097),
    Tree(33, "chain", batch=2, dtype=torch.float64),
    Tree(9, batch=3, vocab=9, sharp=0.0),
]


def _tree(case: Tree) -> tuple[TokenTree, torch.Generator]:
    g = torch.Generator().manual_seed(case.nodes + case.vocab)
    return random_tree(g, case.batch, case.nodes, case.vocab, shape=case.shape, ragged=case.batch > 1), g


def _to(tree: TokenTree, device: str, draft_probs: Tensor | None = None) -> TokenTree:
    valid = None if tree.valid is None else tree.valid.to(device)
    return TokenTree(tree.tokens.to(device), tree.parents.to(device), valid, draft_probs, check=False)


def check_follow(case: Tree, device: str = "cpu") -> None:
    """The path of random choices, most of which agree with a child."""
    tree, g = _tree(case)
    width = tree.max_depth + 1
    for share in (0.0, 0.8, 1.0):
        choices = torch.randint(case.vocab, tree.tokens.shape, generator=g)
        for b in range(case.batch):
            for i in valid_nodes(tree, b)[1:]:
                if float(torch.rand((), generator=g)) < share:
                    choices[b, tree.parents[b, i]] = tree.tokens[b, i]
        verdict = ops.accepted_path(_to(tree, device), choices.to(device))
        expected = []
        for b in range(case.batch):
            path = [0]
            while below := [i for i in _children(tree, b, path[-1]) if tree.tokens[b, i] == choices[b, path[-1]]]:
                path += below
            said, rest = choices[b, path].tolist(), width - len(path)
            expected.append([len(path), said[-1], *path, *[-1] * rest, *said, *[int(choices[b, 0])] * rest])
        assert verdict.tolist() == expected


def check_drawn(case: Tree, device: str = "cpu") -> None:
    """Rejection sampling node by node, in float64, with the same random numbers."""
    tree, g = _tree(case)
    shape = (case.batch, case.nodes, case.vocab)
    logits, other = (torch.randn(shape, generator=g, dtype=torch.float64) * 2 for _ in range(2))
    p, q = logits.softmax(-1).to(case.dtype), (logits + case.sharp * other).softmax(-1).to(case.dtype)
    chances, last = torch.rand(2, case.batch, case.nodes, generator=g, dtype=case.dtype)
    drawn = _to(tree, device, q.to(device))
    choices = ops.choose_drawn(drawn, p.to(device), chances.to(device), last.to(device)).cpu()
    for b in range(case.batch):
        for i in valid_nodes(tree, b):
            expected = _draw_at(tree, b, i, p[b, i].double(), q[b, i].double(), chances[b].double(), last[b, i])
            assert int(choices[b, i]) == expected, (b, i)
    # The root alone, with its children.
    drawn.valid = (tree.parents <= 0).to(device) & drawn.alive
    drawn.parents, drawn.draft_probs = drawn.parents.clamp(max=0), q[:, :1].to(device)
    roots = ops.choose_drawn(drawn, p[:, :1].to(device), chances.to(device), last[:, :1].to(device))
    assert torch.equal(roots.cpu(), choices[:, :1])


def _draw_at(tree: TokenTree, row: int, node: int, p: Tensor, q: Tensor, chances: Tensor, last: Tensor) -> int:
    for child in _children(tree, row, node):
        token = int(tree.tokens[row, child])
        if chances[child] * q[token] < p[token]:
            return token
        left = (p - q).clamp(min=0)
        p = left / left.sum() if float(left.sum()) > 0 else p
        q = q.clone()
        q[token] = 0
        q = q / q.sum() if float(q.sum()) > 0 else q
    return _quantile(p, last)


def check_quantile(case: Tree, device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(case.vocab)
    probs = torch.rand(case.batch, case.nodes, case.vocab, generator=g, dtype=case.dtype)
    probs[torch.rand(probs.shape, generator=g) < 0.4] = 0.0  # tokens that were filtered out
    probs[..., -1] = 0.1
    for uniform in (torch.rand(probs.shape[:-1], generator=g), torch.zeros(probs.shape[:-1])):
        found = ops.quantile(probs.to(device), uniform.to(device)).cpu()
        for b in range(case.batch):
            assert found[b].tolist() == [_quantile(p, u) for p, u in zip(probs[b], uniform[b], strict=True)]


def _quantile(p: Tensor, uniform: Tensor) -> int:
    total = p.double().cumsum(0)
    return int((total > float(uniform) * total[-1]).nonzero()[0])


def _children(tree: TokenTree, row: int, node: int) -> list[int]:
    return [i for i in valid_nodes(tree, row) if i and int(tree.parents[row, i]) == node]


# ---------------------------------------------------------------------- keeping a path


@dataclass(frozen=True)
class Buffer:
    """One KV buffer and how far the rows' ends lie apart."""

    nodes: int
    shape: str = "random"
    batch: int = 1
    planes: int = 4
    heads: int = 2
    head_dim: int = 16
    prefix: int = 9
    dtype: torch.dtype = torch.float32


BUFFERS = [
    Buffer(1),
    Buffer(60, planes=6, head_dim=80, dtype=torch.bfloat16),
    Buffer(63, "chain", batch=3, heads=1),
    Buffer(13, batch=4, prefix=5, head_dim=24),
    Buffer(20, "star", batch=2, dtype=torch.float16),
]


def check_compact(case: Buffer, device: str = "cpu") -> None:
    """Paths to the deepest node, rows ending up to some slots apart, one row keeping nothing; the rest stays."""
    g = torch.Generator().manual_seed(case.nodes)
    tree = random_tree(g, case.batch, case.nodes, 999, shape=case.shape, ragged=False)
    paths = [root_path(tree, b, int(tree.depth[b].argmax())) if b != 1 else [] for b in range(case.batch)]
    width = max(map(len, paths))
    path = torch.tensor([row + [-1] * (width - len(row)) for row in paths])
    lengths = torch.tensor([case.prefix - b for b in range(case.batch)], dtype=torch.int32)
    shape = (case.planes, case.batch, case.heads, case.prefix + case.nodes + 4, case.head_dim)
    for start in (case.prefix, torch.tensor([case.prefix])):
        storage = torch.randn(shape, generator=g).to(case.dtype)
        expected = storage.clone()
        for b, row in enumerate(paths):
            for i, node in enumerate(row):
                expected[:, b, :, int(lengths[b]) + i] = storage[:, b, :, case.prefix + node]
        moved = storage.to(device)
        at = start.to(device) if isinstance(start, Tensor) else start
        ops.compact_kv(moved, path.to(device), at, lengths.to(device))
        assert torch.equal(moved[..., :-1, :].cpu(), expected[..., :-1, :])


# ---------------------------------------------------------------------- growing a tree


@dataclass(frozen=True)
class Logits:
    """One shape of logits; ``steps`` makes many of them equal."""

    vocab: int
    k: int
    shape: tuple[int, ...] = (3,)
    steps: int | None = None
    masked: float = 0.0
    dtype: torch.dtype = torch.float32


LOGITS = [
    Logits(1, 1),
    Logits(5, 8, (2, 3)),
    Logits(2048, 10, (1,)),
    Logits(2049, 10, (2, 2), dtype=torch.bfloat16),
    Logits(6000, 4, steps=3),
    Logits(4500, 3, masked=0.999),
    Logits(300, 10, dtype=torch.float16, masked=0.5),
]


def check_top(case: Logits, device: str = "cpu") -> None:
    """The greatest of all, by a sort of float64 log probabilities; equal ones may come in any order."""
    g = torch.Generator().manual_seed(case.vocab)
    logits = torch.randn(*case.shape, case.vocab, generator=g) * 4
    if case.steps:
        logits = (logits * case.steps / 12).round()
    logits[torch.rand(logits.shape, generator=g) < case.masked] = -torch.inf
    logits[..., -1] = 0.5
    logits = logits.to(case.dtype)
    tokens, log_probs = (t.cpu() for t in ops.top_log_probs(logits.to(device), case.k))
    exact = logits.double().log_softmax(-1)
    assert tokens.shape == log_probs.shape == (*case.shape, min(case.k, case.vocab))
    assert all(len(set(row)) == len(row) for row in tokens.flatten(0, -2).tolist())
    torch.testing.assert_close(exact.gather(-1, tokens), exact.sort(dim=-1, descending=True)[0][..., : case.k])
    torch.testing.assert_close(log_probs.double(), exact.gather(-1, tokens), rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Candidates:
    """One shape of a grown tree; ``steps`` makes many scores equal."""

    entries: int
    kept: int
    batch: int = 1
    steps: int | None = None


CANDIDATES = [
    Candidates(1, 1),
    Candidates(10, 4, batch=3),
    Candidates(64, 64),
    Candidates(65, 10, batch=2, steps=4),
    Candidates(510, 59, steps=40),
    Candidates(20, 50),
    Candidates(300, 300, batch=2, steps=2),
]


def check_beam(case: Candidates, device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(case.entries)
    scores = -torch.rand(case.batch, case.entries, generator=g) * (case.steps or 9)
    scores = scores.round() if case.steps else scores
    tokens = torch.randint(999, scores.shape, generator=g)
    best, token, at = (t.cpu() for t in ops.next_beam(scores.to(device), tokens.to(device), case.kept))
    assert torch.equal(best, scores.sort(dim=1, descending=True)[0][:, : case.kept])
    assert torch.equal(best, scores.gather(1, at))
    assert torch.equal(token, tokens.gather(1, at))
    assert all(len(set(row)) == len(row) for row in at.tolist())


def check_keep(case: Candidates, device: str = "cpu") -> None:
    """Candidates in their order of preference, each behind its parent."""
    g = torch.Generator().manual_seed(case.entries)
    root = torch.arange(2 * case.batch)[1::2]  # a column, as a verdict's bonus is
    tokens = torch.randint(999, (case.batch, case.entries), generator=g)
    parents = [[int(torch.randint(i + 1, (), generator=g)) for i in range(case.entries)] for _ in range(case.batch)]
    scores = torch.zeros(case.batch, 1 + case.entries)
    for b, row in enumerate(parents):
        for i, parent in enumerate(row):
            step = torch.rand((), generator=g)
            scores[b, i + 1] = scores[b, parent] - ((step * case.steps).floor() if case.steps else step)
    kept, above, score = ops.keep_best(
        *(t.to(device) for t in (root, tokens, torch.tensor(parents), scores[:, 1:].contiguous())), case.kept
    )
    for b, row in enumerate(parents):
        order = sorted(range(case.entries), key=lambda i: (-float(scores[b, i + 1]), i))[: case.kept]
        place = {0: 0} | {i + 1: at + 1 for at, i in enumerate(order)}
        assert kept[b].tolist() == [int(root[b]), *(int(tokens[b, i]) for i in order)]
        assert above[b].tolist() == [-1, *(place[row[i]] for i in order)]
        assert score[b].tolist() == [float(scores[b, i + 1]) for i in order]


# ---------------------------------------------------------------------- all of them

CHECKS: list[Callable[..., None]] = [
    *(partial(check_attention, case) for case in ATTENTION),
    *(partial(check, case) for check in (check_follow, check_drawn) for case in TREES),
    *(partial(check_quantile, case) for case in (*TREES[:4], Tree(3, vocab=8193), Tree(5, dtype=torch.float64))),
    *(partial(check_peaked, case) for case in PEAKED),
    *(partial(check_exact, case) for case in EXACT),
    *(partial(check_tiny_shares, vocab) for vocab in (300, 5000)),
    *(partial(check_compact, case) for case in BUFFERS),
    *(partial(check_top, case) for case in LOGITS),
    *(partial(check, case) for check in (check_beam, check_keep) for case in CANDIDATES),
]


def name(check: Callable[..., None]) -> str:
    assert isinstance(check, partial)
    return f"{check.func.__name__} {check.args[0]}"


_empty, _new_empty = torch.empty, torch.Tensor.new_empty


def _filled(made: Tensor) -> Tensor:
    return made.fill_(torch.nan if made.is_floating_point() else -7)


def _nan_filled(*args: object, **options: object) -> Tensor:
    return _filled(_empty(*args, **options))  # type: ignore[call-overload]


def _new_nan_filled(*args: object, **options: object) -> Tensor:
    return _filled(_new_empty(*args, **options))  # type: ignore[arg-type]


def main() -> int:
    """Run the grid, and name what fails."""
    failed = 0
    mend_interpreter()
    for check in CHECKS:
        began = clock()
        try:
            check()
        except Exception as error:  # whatever it is, the other cases say more
            failed += 1
            print(f"{name(check)}:\n{type(error).__name__}: {error}\n")
        if os.environ.get("VERBOSE"):
            print(f"{clock() - began:6.2f} s {name(check)}")
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
