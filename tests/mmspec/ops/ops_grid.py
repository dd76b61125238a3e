"""One grid of awkward cases for every implementation of ``mmspec.ops``, compared with plain loops.

``python -m tests.mmspec.ops.ops_grid`` runs it on a CPU with the implementation that ``MMSPEC_KERNELS`` names. The
Triton kernels need ``TRITON_INTERPRET=1`` from the start of the process for that, so tests run them in one of their
own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec import TokenTree, ops
from tests.interpreter import filled_memory, run_grid
from tests.tiny import random_tree, root_path, valid_nodes

Shape = tuple[tuple[Any, ...], dict[str, Any]]


def case(*sizes: Any, **options: Any) -> Shape:
    """Arguments of a check; ``steps`` makes many numbers equal."""
    return sizes, options


# ---------------------------------------------------------------------- attention


ATTENTION = [
    case(1, 1),
    case(1, 17, batch=3, heads=7, kv_heads=1, head_dim=128, dtype=torch.bfloat16),
    case(1, 700, heads=4, kv_heads=1),
    case(3, 130, "chain", heads=8, kv_heads=2, head_dim=80),
    case(3, 17, batch=2, head_dim=96, dtype=torch.float16, earlier=5),
    case(60, 17, heads=2, kv_heads=1, head_dim=128, dtype=torch.bfloat16),
    case(60, 400, heads=2, kv_heads=1, head_dim=80, batch=2, free=9),
    case(63, 130, "star", heads=4, kv_heads=1),
    case(63, 1, "chain", batch=2, head_dim=24),
    case(16, 10, batch=2, window=20, heads=4),
    case(16, 200, batch=2, window=20, heads=4),
    case(20, 300, "chain", window=8, earlier=3, softcap=5.0, free=70),
    case(5, 260, batch=3, heads=4, kv_heads=4, softcap=2.0, dtype=torch.bfloat16, free=3),
    case(9, 140, batch=1, heads=2, kv_heads=1, head_dim=256, dtype=torch.float16),
    case(128, 66, heads=1, kv_heads=1, head_dim=16, window=1000),
    case(1, 300, heads=4, kv_heads=2, head_dim=192, value_dim=128, dtype=torch.bfloat16),
    case(33, 200, batch=2, head_dim=24, value_dim=10, free=5),
    case(9, 140, "chain", heads=2, kv_heads=1, head_dim=40, value_dim=70, window=20, softcap=3.0, earlier=2),
]


def check_attention(
    nodes: int,
    prefix: int,
    shape: str = "random",
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    earlier: int = 0,
    free: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    device: str = "cpu",
) -> None:
    """Every node of every head against a softmax over the slots that it attends to.

    Args:
        prefix: committed slots of the first row; later rows have fewer.
        earlier: nodes forwarded before the tree's, which only some nodes attend to.
        free: slots after the tail, as in a buffer of fixed size; ``start`` is then passed.
        value_dim: head dimension of the values; None is the keys' dimension.
    """
    g = torch.Generator().manual_seed(nodes + prefix)
    lengths = torch.tensor([max(prefix - 2 * b, 0) for b in range(batch)], dtype=torch.int32)
    tree = random_tree(g, batch, nodes, 999, shape=shape, ragged=False)
    mask = torch.rand(batch, nodes, earlier, generator=g) < 0.5
    mask = torch.cat([mask, tree.ancestors], dim=2)
    end = prefix + mask.shape[2]
    slots, span = end + free, window or 10**9
    query = torch.randn(batch, nodes, heads, head_dim, generator=g).to(dtype).transpose(1, 2)
    allowed = torch.zeros(batch, 1, nodes, slots, dtype=torch.bool)
    allowed[..., prefix:end] = mask[:, None]
    # A view into a larger buffer, as a layer's part of the cache is; slots that must not be read are NaN, and so are
    # those before every window.
    buffer_shape = (batch, kv_heads, slots + 3)
    widths = head_dim, value_dim or head_dim
    buffers = [torch.full((*buffer_shape, width), torch.nan, dtype=dtype) for width in widths]
    for b, length in enumerate(lengths.tolist()):
        for i, depth in enumerate(tree.depth[b].tolist()):
            allowed[b, 0, i, max(length + depth - span + 1, 0) : length] = True
        written = [*range(max(length - span + 1, 0), length), *range(prefix, end)]
        for buffer in buffers:
            buffer[b, :, written] = torch.randn(kv_heads, len(written), buffer.shape[3], generator=g).to(dtype)
    key, value = (buffer[:, :, :slots] for buffer in buffers)

    def on(t: Tensor | None) -> Any:
        return None if t is None else t.to(device)

    with filled_memory():
        read = ops.tree_attention(
            *map(on, (query, key, value, lengths, mask)),
            scale=0.2,
            start=on(torch.tensor([prefix])) if free else None,
            depth=on(tree.depth) if window else None,
            window=window,
            softcap=softcap,
        )
    assert read.shape == (batch, nodes, heads, widths[1])
    assert read.dtype == dtype
    close = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    keys, values = (x.double().nan_to_num().repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    scores = query.double() @ keys.mT * 0.2
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    expected = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(read.cpu().double(), expected.transpose(1, 2), rtol=close, atol=close)


# ---------------------------------------------------------------------- between products


NORMS = [
    case((1, 1), 48),
    case((2, 5), 64, residual=False),
    case((3, 7), 80, after=True, plus=1.0),
    case((2, 3), 40, parts=2, residual=False),
    case((2, 3), 40, parts=2, after=True),
    case((1, 60), 1030, dtype=torch.bfloat16),
    case((2, 4), 96, after=True, plus=1.0, dtype=torch.float16),
]


def check_norm(
    rows: tuple[int, ...],
    features: int,
    *,
    parts: int = 1,
    residual: bool = True,
    after: bool = False,
    plus: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Each row against float64: the sum, and the norm of the rounded sum. Inputs are not changed."""
    g = torch.Generator().manual_seed(features)
    near = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    shape = *rows, parts * features
    x, added = (torch.randn(shape, generator=g).to(dtype) * 3 for _ in range(2))
    weight, gain = (torch.randn(parts, features, generator=g).to(dtype) for _ in range(2))
    given = [t.to(device) for t in (x, added, weight, gain)]
    before = [t.clone() for t in given]
    options = {"plus": plus, "after": given[3] if after else None}
    total, normed = ops.add_norm(given[0], given[1] if residual else None, given[2], 1e-3, **options)
    assert all(map(torch.equal, given, before))
    assert total.shape == normed.shape == shape
    assert total.dtype == normed.dtype == dtype

    def norm(row: Tensor, gains: Tensor) -> Tensor:
        return row / (row.square().mean() + 1e-3).sqrt() * (gains.double() + plus)

    # Of the rounded sum, which may be rounded to either side.
    rounded = total.cpu().double().reshape(-1, features)
    for place, (row, add) in enumerate(zip(*(t.double().reshape(-1, features) for t in (x, added)), strict=True)):
        part = place % parts
        expected = (norm(row, gain[part]) if after else row) + add * residual
        torch.testing.assert_close(rounded[place], expected, rtol=near, atol=near)
        found = normed.cpu().double().reshape(-1, features)[place]
        torch.testing.assert_close(found, norm(rounded[place], weight[part]), rtol=near, atol=near)


ROTATED = [
    case(1),
    case(5, batch=3, offset=3),
    case(7, batch=2, heads=3, kv_heads=1, head_dim=24, shared="rows"),
    case(4, batch=2, head_dim=80, shared="nodes", normed=True),
    case(6, batch=2, normed=True, plus=1.0, offset=2, dtype=torch.bfloat16),
    case(3, batch=2, heads=0, normed=True),
    case(60, heads=8, head_dim=128, dtype=torch.float16),
]


def check_rotated(
    nodes: int,
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    shared: str = "",
    normed: bool = False,
    plus: float = 0.0,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Pairs of features turned one by one in float64; keys and values in their slots, the others as they were.

    Args:
        shared: "rows" or "nodes" if the positions are those of all rows, or of all nodes of a row.
    """
    g = torch.Generator().manual_seed(nodes)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(batch, nodes, width, generator=g).to(dtype)
    angle = torch.rand(batch, nodes, head_dim // 2, generator=g) * 6
    angle = angle[:1] if shared == "rows" else angle[:, :1] if shared == "nodes" else angle
    # The other halves may contain signed zeros.
    rotation = torch.cat([angle.cos(), angle.cos()], -1), torch.cat([-angle.sin(), angle.sin()], -1)
    weights = torch.rand(2, head_dim, generator=g) + 0.5
    # Views into a larger buffer, as a layer's part of the cache is.
    whole = torch.full((2, batch, kv_heads, nodes + 9, head_dim), torch.nan, dtype=dtype)
    kept, start = whole.to(device), 4
    query = ops.rotate_and_cache(
        qkv.to(device),
        (rotation[0].to(device), rotation[1].to(device)),
        *(kept[0], kept[1], torch.tensor([start], device=device), offset),
        norms=tuple(weights.to(device)) if normed else (),
        eps=1e-3,
        plus=plus,
    )
    assert query.shape == (batch, heads, nodes, head_dim)
    assert query.dtype == dtype
    angle = angle.expand(batch, nodes, -1).double()
    parts = qkv.double().unflatten(-1, (-1, head_dim))
    turned = torch.empty_like(parts)
    for b, node, head in itertools.product(range(batch), range(nodes), range(parts.shape[2])):
        x = parts[b, node, head]
        of_key = head >= heads
        if head >= heads + kv_heads:
            turned[b, node, head] = x
            continue
        if normed:
            x = x / (x.square().mean() + 1e-3).sqrt() * (weights[int(of_key)].double() + plus)
        pairs = torch.complex(*x.chunk(2)) * torch.polar(torch.ones_like(angle[b, node]), angle[b, node])
        turned[b, node, head] = torch.cat([pairs.real, pairs.imag])
    near = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    slots = slice(start + offset, start + offset + nodes)
    expected = whole.double()
    expected[0, :, :, slots] = turned[:, :, heads : heads + kv_heads].transpose(1, 2)
    expected[1, :, :, slots] = turned[:, :, heads + kv_heads :].transpose(1, 2)
    torch.testing.assert_close(kept.cpu().double(), expected, rtol=near, atol=near, equal_nan=True)
    torch.testing.assert_close(query.cpu().double(), turned[:, :, :heads].transpose(1, 2), rtol=near, atol=near)


GATED = [
    case(shape, gelu, dtype)
    for shape in ((1, 1, 6), (2, 3, 2600))
    for gelu in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
]


def check_gated(shape: tuple[int, ...], gelu: bool, dtype: torch.dtype, device: str = "cpu") -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = up * (gate * (1 + inner.tanh()) / 2 if gelu else gate / (1 + (-gate).exp()))
    near = 1e-5 if dtype == torch.float32 else 1.6e-2
    found = ops.act_and_mul(x.to(device), gelu)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), expected, rtol=near, atol=near)


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


def check_ancestors(case: Tree, device: str = "cpu") -> None:
    tree, _ = _tree(case)
    ancestors, depth = (t.cpu() for t in ops.tree_ancestors(tree.parents.to(device)))
    for b, i in itertools.product(range(case.batch), range(case.nodes)):
        path = root_path(tree, b, i)
        assert ancestors[b, i].nonzero().flatten().tolist() == sorted(path)
        assert depth[b, i] == len(path) - 1


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


def rejections(p: Sequence[Any], q: Sequence[Any], children: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Recursive rejection sampling of one node, over floats or fractions.

    Returns:
        The chance with which each child is accepted, those before it being rejected; the distribution of the token
        where all are rejected. A chance of one ends both.

    Source: SpecInfer (arXiv 2305.09781, alg. 2); without replacement: arXiv 2402.14160.
    """
    shares: list[Any] = []
    p, q = list(p), list(q)
    for token in children:
        shares.append(min(p[token] / q[token], 1))
        if shares[-1] == 1:
            break
        p = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
        q[token] = 0
        total, rest = sum(p), sum(q)
        p, q = [a / total for a in p], [b / rest for b in q]
    return shares, p


def chosen(p: Sequence[Any], q: Sequence[Any], children: Sequence[int], chances: Sequence[float], last: float) -> int:
    """The token after a node."""
    shares, residual = rejections(p, q, children)
    for token, share, chance in zip(children, shares, chances, strict=False):
        if chance < share:
            return token
    return _quantile(residual, last)


def _quantile(p: Sequence[Any], uniform: float) -> int:
    wanted = uniform * sum(p)
    return next(token for token, total in enumerate(itertools.accumulate(p)) if total > wanted)


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
            below = _children(tree, b, i)
            given = tree.tokens[b, below].tolist(), chances[b, below].tolist(), last[b, i].item()
            assert int(choices[b, i]) == chosen(p[b, i].tolist(), q[b, i].tolist(), *given), (b, i)
    # The root alone, with its children.
    drawn.valid = (tree.parents <= 0).to(device) & drawn.alive
    drawn.parents, drawn.draft_probs = drawn.parents.clamp(max=0), q[:, :1].to(device)
    roots = ops.choose_drawn(drawn, p[:, :1].to(device), chances.to(device), last[:, :1].to(device))
    assert torch.equal(roots.cpu(), choices[:, :1])


def check_exact(dtype: torch.dtype, device: str = "cpu") -> None:
    """All ways of drawing two children of four, enumerated in fractions: tokens are distributed as p; and just below
    and just above each chance and each border of the rest, the tokens equal the enumeration."""
    p, q = ([Fraction(n, 12) for n in row] for row in ((1, 4, 5, 2), (8, 2, 1, 1)))
    emitted, rows, near = [Fraction(0)] * 4, [], Fraction(1, 1000)
    for order in itertools.permutations(range(4), 2):
        weight = q[order[0]] * q[order[1]] / (1 - q[order[0]])
        shares, residual = rejections(p, q, order)
        for rank, (token, share) in enumerate(zip(order, shares, strict=False)):
            emitted[token] += weight * share
            weight *= 1 - share
            tried = [2.0] * rank
            rows += [(order, [*tried, chance, 0.5], 0.5) for chance in (share - near, share + near) if 0 < chance < 1]
        emitted = [a + weight * b for a, b in zip(emitted, residual, strict=True)]
        if shares[-1] < 1:
            borders = {*itertools.accumulate(residual)} - {Fraction(0), Fraction(1)}
            rows += [(order, [2.0, 2.0], last) for border in borders for last in (border - near, border + near)]
    assert emitted == p
    tree = _stars([order for order, _, _ in rows])
    chances = torch.tensor([[0.0, *map(float, row[:2])] for _, row, _ in rows])
    last = torch.tensor([[float(number)] * 3 for _, _, number in rows])
    dense = (torch.tensor([[float(x) for x in row]] * len(rows), dtype=torch.float64) for row in (p, q))
    got = _choices_of(tree, *dense, chances, last, dtype, device)
    assert got == [chosen(p, q, order, row, number) for order, row, number in rows]


def _stars(rows: Sequence[Sequence[int]]) -> TokenTree:
    """A tree per row: the children of a root 0."""
    tokens = torch.tensor([[0, *row] for row in rows])
    parents = torch.zeros_like(tokens)
    parents[:, 0] = -1
    return TokenTree(tokens, parents)


def _choices_of(
    tree: TokenTree, p: Tensor, q: Tensor, chances: Tensor, last: Tensor, dtype: torch.dtype, device: str
) -> list[int]:
    """What comes after the roots, p and q being (batch, vocab), the same at every node."""
    p, q = (x[:, None].expand(-1, tree.nodes, -1).to(device, dtype).contiguous() for x in (p, q))
    return ops.choose_drawn(_to(tree, device, q), p, chances.to(p), last.to(p))[:, 0].tolist()


def check_tiny_shares(vocab: int, device: str = "cpu") -> None:
    """One likely token, then many whose probabilities are too small for float32 sums to tell apart."""
    step = 2.0**-26
    probs = torch.full((vocab,), step)
    probs[0], probs[-1] = 0.75, 0.25 - (vocab - 2) * step
    wanted = torch.linspace(0, (vocab - 3) / 4, 20).long() * 2.0**-24 + 0.75  # each is a float32
    expected = ((wanted.double() - 0.75) / step).long() + 1
    got = ops.quantile(probs.expand(len(wanted), -1).to(device), wanted.to(device)).cpu()
    assert got.tolist() == expected.tolist()


def check_quantile(case: Tree, device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(case.vocab)
    probs = torch.rand(case.batch, case.nodes, case.vocab, generator=g, dtype=case.dtype)
    probs[torch.rand(probs.shape, generator=g) < 0.4] = 0.0  # tokens that were filtered out
    probs[..., -1] = 0.1
    for uniform in (torch.rand(probs.shape[:-1], generator=g), torch.zeros(probs.shape[:-1])):
        found = ops.quantile(probs.to(device), uniform.to(device)).cpu()
        for b in range(case.batch):
            assert found[b].tolist() == [
                _quantile(*row) for row in zip(probs[b].tolist(), uniform[b].tolist(), strict=True)
            ]


def _children(tree: TokenTree, row: int, node: int) -> list[int]:
    return [i for i in valid_nodes(tree, row) if i and int(tree.parents[row, i]) == node]


# ---------------------------------------------------------------------- keeping a path


BUFFERS = [
    case(1),
    case(60, planes=6, head_dim=80, dtype=torch.bfloat16),
    case(63, "chain", batch=3, heads=1),
    case(13, batch=4, prefix=5, head_dim=24),
    case(20, "star", batch=2, dtype=torch.float16),
]


def check_compact(
    nodes: int,
    shape: str = "random",
    *,
    batch: int = 1,
    planes: int = 4,
    heads: int = 2,
    head_dim: int = 16,
    prefix: int = 9,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Paths to the deepest node, rows ending up to some slots apart, one row keeping nothing; the rest stays."""
    g = torch.Generator().manual_seed(nodes)
    tree = random_tree(g, batch, nodes, 999, shape=shape, ragged=False)
    paths = [root_path(tree, b, int(tree.depth[b].argmax())) if b != 1 else [] for b in range(batch)]
    width = max(map(len, paths))
    path = torch.tensor([row + [-1] * (width - len(row)) for row in paths])
    lengths = torch.tensor([prefix - b for b in range(batch)], dtype=torch.int32)
    whole = (planes, batch, heads, prefix + nodes + 4, head_dim)
    for start in (prefix, torch.tensor([prefix])):
        storage = torch.randn(whole, generator=g).to(dtype)
        expected = storage.clone()
        for b, row in enumerate(paths):
            for i, node in enumerate(row):
                expected[:, b, :, int(lengths[b]) + i] = storage[:, b, :, prefix + node]
        moved = storage.to(device)
        at = start.to(device) if isinstance(start, Tensor) else start
        ops.compact_kv(moved, path.to(device), at, lengths.to(device))
        assert torch.equal(moved[..., :-1, :].cpu(), expected[..., :-1, :])


# ---------------------------------------------------------------------- growing a tree


LOGITS = [
    case(1, 1),
    case(5, 8, (2, 3)),
    case(2048, 10, (1,)),
    case(2049, 10, (2, 2), dtype=torch.bfloat16),
    case(6000, 4, steps=3),
    case(4500, 3, masked=0.999),
    case(300, 10, dtype=torch.float16, masked=0.5),
]


def check_top(
    vocab: int,
    k: int,
    shape: tuple[int, ...] = (3,),
    *,
    steps: int | None = None,
    masked: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """The greatest of all, by a sort of float64 log probabilities; equal ones may come in any order. Columns after the
    vocabulary, as of a head that is padded, are NaN."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(*shape, vocab, generator=g) * 4
    if steps:
        logits = (logits * steps / 12).round()
    logits[torch.rand(logits.shape, generator=g) < masked] = -torch.inf
    logits[..., -1] = 0.5
    logits = logits.to(dtype)
    padded = F.pad(logits.to(device), (0, 3), value=torch.nan)
    tokens, log_probs = (t.cpu() for t in ops.top_log_probs(padded[..., :vocab], k))
    exact = logits.double().log_softmax(-1)
    assert tokens.shape == log_probs.shape == (*shape, min(k, vocab))
    assert all(len(set(row)) == len(row) for row in tokens.flatten(0, -2).tolist())
    torch.testing.assert_close(exact.gather(-1, tokens), exact.sort(dim=-1, descending=True)[0][..., :k])
    torch.testing.assert_close(log_probs.double(), exact.gather(-1, tokens), rtol=1e-5, atol=1e-5)


CANDIDATES = [
    case(1, 1),
    case(10, 4, batch=3),
    case(64, 64),
    case(65, 10, batch=2, steps=4),
    case(510, 59, steps=40),
    case(20, 50),
    case(300, 300, batch=2, steps=2),
]


def check_beam(entries: int, kept: int, *, batch: int = 1, steps: int | None = None, device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(entries)
    scores = -torch.rand(batch, entries, generator=g) * (steps or 9)
    scores = scores.round() if steps else scores
    tokens = torch.randint(999, scores.shape, generator=g)
    children = next(count for count in (5, 3, 2, 1) if entries % count == 0)
    for above in (None, -torch.rand(batch, entries // children, generator=g)):
        # A separate layout, as for independent slots.
        level = [x.unflatten(1, (-1, children)).mT.contiguous().mT.to(device) for x in (scores, tokens)]
        given = None if above is None else above.to(device)
        whole, beam = ops.next_beam(given, *level, kept, 7)
        whole, best, token, origin, place = (t.cpu() for t in (whole, *beam))
        expected = scores if above is None else scores + above.repeat_interleave(children, 1)
        assert torch.equal(whole, expected)
        assert torch.equal(best, expected.sort(dim=1, descending=True)[0][:, :kept])
        assert torch.equal(best, expected.gather(1, place - 7))
        assert torch.equal(token, tokens.gather(1, place - 7))
        assert torch.equal(origin, (place - 7) // children)
        assert all(len(set(row)) == len(row) for row in place.tolist())


LEVELS = [case(1, 1, 1, 3), case(2, 4, 9, 4), case(3, 10, 50, 10), case(2, 3, 7, 1)]


def check_reach(batch: int, parents: int, entries: int, width: int, device: str = "cpu") -> None:
    """Rows of parents, and each node itself; its inputs are its token's embedding and its parent's state."""
    g = torch.Generator().manual_seed(entries)
    reach = torch.rand(batch, parents, entries, generator=g) < 0.5
    origin = torch.randint(parents, (width, batch), generator=g).T
    if batch == 2:  # a first level is the same in all rows
        reach = reach[:1].expand(batch, -1, -1)
    extended = ops.extend_reach(reach.to(device), origin.to(device)).cpu()
    for b, row in enumerate(origin.tolist()):
        for node, parent in enumerate(row):
            assert extended[b, node].tolist() == [*reach[b, parent].tolist(), *(one == node for one in range(width))]
    table, tokens = torch.randn(99, 40, generator=g), torch.randint(20, (width, batch), generator=g).T
    ids, states = torch.randperm(99, generator=g)[:20], torch.randn(batch, parents, 2 * 1030, generator=g)[..., ::2]
    for named in (None, ids):
        given = [table, tokens, states, origin] if named is None else [table, tokens, states, origin, named]
        inputs = ops.node_inputs(*(t.to(device) for t in given)).cpu()
        rows = tokens if named is None else named[tokens]
        for b, row in enumerate(origin.tolist()):
            for node, parent in enumerate(row):
                assert torch.equal(inputs[b, node], torch.cat([table[rows[b, node]], states[b, parent]]))


def check_last(width: int, device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(width)
    state, outputs = torch.randn(5, 1100, generator=g), torch.randn(4, width, 1100, generator=g)
    length = torch.tensor([[width, 9], [0, 9], [1, 9], [(width + 1) // 2, 9]])
    written = state.to(device)
    ops.write_last(written[:4], outputs.to(device), length.to(device)[:, 0])  # a column, as a verdict's length is
    expected = state.clone()
    for row in (0, 2, 3):
        expected[row] = outputs[row, length[row, 0] - 1]
    assert torch.equal(written.cpu(), expected)


def check_keep(entries: int, kept: int, *, batch: int = 1, steps: int | None = None, device: str = "cpu") -> None:
    """Candidates in their order of preference, each behind its parent."""
    g = torch.Generator().manual_seed(entries)
    root = torch.arange(2 * batch)[1::2]  # a column, as a verdict's bonus is
    tokens = torch.randint(999, (batch, entries), generator=g)
    children = 3 if entries > 10 else 2
    extended = max(0, entries - children) // children
    first = entries - extended * children
    places = torch.empty(batch, extended, dtype=torch.long)
    for place in range(extended):
        places[:, place] = torch.randint(1, 1 + first + place * children, (batch,), generator=g)
    parents = [[0] * first + [one for one in row for _ in range(children)] for row in places.tolist()]
    scores = torch.zeros(batch, 1 + entries)
    for b, row in enumerate(parents):
        for i, parent in enumerate(row):
            step = torch.rand((), generator=g)
            scores[b, i + 1] = scores[b, parent] - ((step * steps).floor() if steps else step)
    given = places.to(device) if extended else None
    best, above, score = ops.keep_best(
        *(root.to(device), tokens.to(device), given, children, scores[:, 1:].contiguous().to(device), kept)
    )
    for b, row in enumerate(parents):
        order = sorted(range(entries), key=lambda i: (-float(scores[b, i + 1]), i))[:kept]
        place = {0: 0} | {i + 1: at + 1 for at, i in enumerate(order)}
        assert best[b].tolist() == [int(root[b]), *(int(tokens[b, i]) for i in order)]
        assert above[b].tolist() == [-1, *(place[row[i]] for i in order)]
        assert score[b].tolist() == [0.0, *(float(scores[b, i + 1]) for i in order)]


# ---------------------------------------------------------------------- all of them

_GRID: list[tuple[Callable[..., None], Sequence[Shape]]] = [
    (check_attention, ATTENTION),
    (check_norm, NORMS),
    (check_rotated, ROTATED),
    (check_gated, GATED),
    *((check, [case(tree) for tree in TREES]) for check in (check_follow, check_drawn, check_ancestors)),
    (check_quantile, [case(tree) for tree in (*TREES[:4], Tree(3, vocab=8193), Tree(5, dtype=torch.float64))]),
    (check_exact, [case(torch.float32), case(torch.float64)]),
    (check_tiny_shares, [case(300), case(5000)]),
    (check_compact, BUFFERS),
    (check_top, LOGITS),
    *((check, CANDIDATES) for check in (check_beam, check_keep)),
    (check_reach, LEVELS),
    (check_last, [case(1), case(6)]),
]
CHECKS: dict[str, Callable[..., None]] = {
    f"{check.__name__} {sizes} {options}": partial(check, *sizes, **options)
    for check, cases in _GRID
    for sizes, options in cases
}

if __name__ == "__main__":
    run_grid(CHECKS)
