"""Verification where random cases seldom go: drawn children that held much of q, thresholds on both of their sides, and
tokens of tiny probability. Part of the grid of ``tests.mmspec.ops.ops_grid``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from mmspec import TokenTree, ops


@dataclass(frozen=True)
class Star:
    """Stars whose children are drawn from q without replacement."""

    children: int
    batch: int
    vocab: int
    dtype: torch.dtype = torch.float32


PEAKED = [Star(2, 24, 40), Star(3, 20, 9), Star(4, 6, 4500, torch.float64)]
EXACT = [Star(2, 0, 4), Star(2, 0, 4, torch.float64)]


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
    return next(token for token, total in enumerate(itertools.accumulate(residual)) if total > last)


def stars(rows: Sequence[Sequence[int]]) -> TokenTree:
    """A tree per row: the children of a root 0."""
    tokens = torch.tensor([[0, *row] for row in rows])
    parents = torch.zeros_like(tokens)
    parents[:, 0] = -1
    return TokenTree(tokens, parents)


def check_peaked(case: Star, device: str = "cpu") -> None:
    """Peaked p and q, of which children are really drawn: what is rejected held much of q."""
    g = torch.Generator().manual_seed(case.vocab)
    p, other = (
        (3 * torch.randn(case.batch, case.vocab, generator=g, dtype=torch.float64)).softmax(-1) for _ in range(2)
    )
    q = (p + 2 * other) / 3
    tree = stars(torch.multinomial(q, case.children, generator=g).tolist())
    chances, last = torch.rand(2, *tree.tokens.shape, generator=g, dtype=case.dtype)
    got = choices_of(tree, p, q, chances, last, case.dtype, device)
    rows = zip(p.tolist(), q.tolist(), tree.tokens[:, 1:].tolist(), chances[:, 1:].tolist(), last[:, 0], strict=True)
    expected = [chosen(*row) for row in rows]
    assert got == expected
    accepted_later = sum(token in row[1:] for token, row in zip(got, tree.tokens[:, 1:].tolist(), strict=True))
    assert accepted_later >= case.batch // 6


def check_exact(case: Star, device: str = "cpu") -> None:
    """All ways of drawing two children, enumerated in fractions: tokens are distributed as p; and just below and just
    above each chance and each border of what is left, the tokens are those that were enumerated."""
    p, q = ([Fraction(n, 12) for n in row] for row in ((1, 4, 5, 2), (8, 2, 1, 1)))
    emitted, rows, near = [Fraction(0)] * 4, [], Fraction(1, 1000)
    for order in itertools.permutations(range(4), case.children):
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
    tree = stars([order for order, _, _ in rows])
    chances = torch.tensor([[0.0, *map(float, row[:2])] for _, row, _ in rows])
    last = torch.tensor([[float(number)] * 3 for _, _, number in rows])
    dense = (torch.tensor([[float(x) for x in row]] * len(rows), dtype=torch.float64) for row in (p, q))
    got = choices_of(tree, *dense, chances, last, case.dtype, device)
    assert got == [chosen(p, q, order, row, number) for order, row, number in rows]


def choices_of(
    tree: TokenTree,
    p: torch.Tensor,
    q: torch.Tensor,
    chances: torch.Tensor,
    last: torch.Tensor,
    dtype: torch.dtype,
    device: str,
) -> list[int]:
    """What comes after the roots, p and q being (batch, vocab), the same at every node."""
    p, q = (x[:, None].expand(-1, tree.nodes, -1).to(device, dtype).contiguous() for x in (p, q))
    drawn = TokenTree(tree.tokens.to(device), tree.parents.to(device), draft_probs=q, check=False)
    return ops.choose_drawn(drawn, p, chances.to(p), last.to(p))[:, 0].tolist()


def check_tiny_shares(vocab: int, device: str = "cpu") -> None:
    """One likely token, then many whose probabilities are too small for float32 sums to tell apart."""
    step = 2.0**-26
    probs = torch.full((vocab,), step)
    probs[0], probs[-1] = 0.75, 0.25 - (vocab - 2) * step
    wanted = torch.linspace(0, (vocab - 3) / 4, 20).long() * 2.0**-24 + 0.75  # each is a float32
    expected = ((wanted.double() - 0.75) / step).long() + 1
    got = ops.quantile(probs.expand(len(wanted), -1).to(device), wanted.to(device)).cpu()
    assert got.tolist() == expected.tolist()
