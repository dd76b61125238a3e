"""Tree verification: the target's choice per node and the longest accepted path."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.ops import cpu, cpu_library, kernels

if TYPE_CHECKING:
    from mmspec.core.tree import TokenTree


def follow(tree: TokenTree, choices: Tensor) -> Tensor:
    """Longest path from the root on which every token is the choice at its parent.

    Args:
        tree: (batch, nodes), with maximum depth D.
        choices: (batch, nodes) int64, the target's token after each node.

    Returns:
        (batch, 2 + 2 * (D + 1)) int64, packed for a single device-to-host copy: path length; bonus token; path nodes,
        padded with -1; choice at each of them, padded with the root's.
    """
    if kernels.in_use(choices.device) == "triton":
        from mmspec.ops import triton_verify

        return triton_verify.follow(tree.tokens, tree.parents, tree.valid, choices, tree.max_depth + 1)
    if tree.nodes == 1:
        return torch.tensor([[1, choice, 0, choice] for (choice,) in choices.tolist()], device=choices.device)
    rows = []
    valid = itertools.repeat(None) if tree.valid is None else tree.valid.tolist()
    for tokens, parents, alive, choice in zip(
        tree.tokens.tolist(), tree.parents.tolist(), valid, choices.tolist(), strict=False
    ):
        path = [0]
        for node in range(1, tree.nodes):  # parents precede their children, and siblings differ
            if parents[node] == path[-1] and tokens[node] == choice[path[-1]] and (alive is None or alive[node]):
                path.append(node)
        rest = tree.max_depth + 1 - len(path)
        chosen = [choice[node] for node in path]
        rows.append([len(path), chosen[-1], *path, *[-1] * rest, *chosen, *[choice[0]] * rest])
    return torch.tensor(rows, device=choices.device)


def greedy(scores: Tensor) -> Tensor:
    """Token with the highest score, the lowest of equal ones: (batch, nodes, vocab) float -> (batch, nodes) int64."""
    if cpu_library.in_use(scores):
        return cpu.greatest(scores, 1)[1][..., 0]
    return scores.max(-1).indices  # equals argmax, ties included, and is three times as fast on a CPU


def choose_drawn(tree: TokenTree, probs: Tensor, chances: Tensor, last: Tensor) -> Tensor:
    """Token after each node by recursive rejection sampling of its children, in draw order.

    Child x, drawn from q, is accepted with probability min(1, p(x) / q(x)); on rejection p <- norm(max(p - q, 0)), and
    q loses x and is renormalised. If no child is accepted, the token is sampled from the final p.

    Args:
        tree: its ``draft_probs`` are q, (batch, nodes, vocab) float.
        probs: (batch, nodes, vocab) float, p.
        chances: (batch, nodes) float, uniform in [0, 1), for accepting each node.
        last: (batch, nodes) float, uniform in [0, 1), for sampling after a node whose children are all rejected.

    Returns:
        (batch, nodes) int64.

    Source: SpecInfer (arXiv 2305.09781, alg. 2); without replacement: arXiv 2402.14160.
    """
    assert tree.draft_probs is not None
    if kernels.in_use(probs.device) == "triton":
        from mmspec.ops import triton_verify

        return triton_verify.choose_drawn(tree.tokens, tree.parents, tree.valid, tree.draft_probs, probs, chances, last)
    p, q = probs.clone(), tree.draft_probs.clone()
    child = _children_by_rank(tree)  # (batch, nodes, ranks), -1 where a node has fewer children
    choice = torch.full_like(tree.tokens, -1)
    for rank in range(child.shape[-1]):
        node = child[..., rank]
        place = node.clamp(min=0)
        token = tree.tokens.gather(1, place)[..., None]
        p_token, q_token = p.gather(-1, token)[..., 0], q.gather(-1, token)[..., 0]
        pending = (node >= 0) & (choice < 0)
        accept = pending & (chances.gather(1, place) * q_token < p_token)
        choice = torch.where(accept, token[..., 0], choice)
        reject = (pending & ~accept)[..., None]
        residual = _normalise((p - q).clamp(min=0), otherwise=p)
        p = torch.where(reject, residual, p)
        q = torch.where(reject, _normalise(q.scatter(-1, token, 0.0), otherwise=q), q)
    return torch.where(choice < 0, quantile(p, last), choice)


def quantile(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token at which the cumulative distribution exceeds ``uniform``.

    Args:
        probs: (..., vocab) float, not necessarily normalised.
        uniform: (...) float in [0, 1).

    Returns:
        (...) int64, never a token of probability 0.
    """
    if kernels.in_use(probs.device) == "triton":
        from mmspec.ops import triton_verify

        return triton_verify.quantile(probs, uniform)
    exact = torch.float32 if probs.device.type == "mps" else torch.float64
    total = probs.to(exact).cumsum(-1)
    token = torch.searchsorted(total, (uniform.to(exact) * total[..., -1])[..., None], right=True)[..., 0]
    return token.clamp(max=probs.shape[-1] - 1)


def sample(scores: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling from softmax(scores), as ``quantile``: (..., vocab) and (...) float -> (...) int64."""
    if cpu_library.in_use(scores):
        return cpu.quantile(scores, uniform)
    return quantile(scores.softmax(-1), uniform)


def _normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Normalise the last axis; rows of zeros (p = q up to rounding) are replaced by those of ``otherwise``."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), otherwise)


def _children_by_rank(tree: TokenTree) -> Tensor:
    """Node indices of each node's valid children in order, (batch, nodes, ranks) int64, padded with -1."""
    index = torch.arange(tree.nodes, device=tree.tokens.device)
    is_child = tree.parents[:, None, :] == index[:, None]  # (batch, parent, node)
    if tree.valid is not None:
        is_child &= tree.valid[:, None, :]
    rank = is_child.cumsum(-1) - 1
    ranks = max(1, tree.nodes - 1)
    table = torch.full((*is_child.shape[:2], ranks + 1), -1, device=index.device)
    table = table.scatter(-1, torch.where(is_child, rank, ranks), index.expand_as(rank))[..., :ranks]
    used = int((table >= 0).any(0).any(0).sum())
    return table[..., : max(1, used)]
