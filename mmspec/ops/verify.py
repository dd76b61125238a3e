"""Tree verification: the target's choice per node, the longest accepted path, and the compaction of its KV slots."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.ops import cpu, cpu_library, kernels

if TYPE_CHECKING:
    from mmspec.core.tree import TokenTree


@kernels.operation()
def accepted_path(tree: TokenTree, choices: Tensor) -> Tensor:
    """Longest path from the root on which every token is the choice at its parent.

    Args:
        tree: (batch, nodes), with maximum depth D.
        choices: (batch, nodes) int64, the target's token after each node.

    Returns:
        (batch, 2 + 2 * (D + 1)) int64, packed for a single device-to-host copy: path length; bonus token; path nodes,
        padded with -1; choice at each path node, padded with the root's choice.
    """
    return (_path_on_host if choices.device.type == "cpu" else _path_on_device)(tree, choices)


def _path_on_device(tree: TokenTree, choices: Tensor) -> Tensor:
    """Compute the path without a host sync: nodes on the path are chosen and have only chosen ancestors."""
    width = tree.max_depth + 1
    chosen = tree.tokens == choices.gather(1, tree.parents.clamp(min=0))
    chosen = (chosen if tree.valid is None else chosen & tree.valid) | (tree.parents < 0)
    on_path = (chosen[:, None] | ~tree.ancestors).all(-1)
    # Parents precede children and siblings have distinct tokens, so path nodes ascend.
    place = torch.where(on_path, on_path.cumsum(1) - 1, width)
    index = torch.arange(tree.nodes, device=place.device).expand_as(place)
    path = torch.full((tree.batch, width + 1), -1, device=place.device).scatter(1, place, index)[:, :width]
    length, tokens = on_path.sum(1, keepdim=True), choices.gather(1, path.clamp(min=0))
    return torch.cat([length, tokens.gather(1, length - 1), path, tokens], dim=1)


def _path_on_host(tree: TokenTree, choices: Tensor) -> Tensor:
    if tree.nodes == 1:
        return choices.new_tensor([[1, choice, 0, choice] for (choice,) in choices.tolist()])
    rows = []
    valid = itertools.repeat(None) if tree.valid is None else tree.valid.tolist()
    for tokens, parents, alive, choice in zip(
        tree.tokens.tolist(), tree.parents.tolist(), valid, choices.tolist(), strict=False
    ):
        path = [0]
        for node in range(1, tree.nodes):  # parents precede children, siblings have distinct tokens
            if parents[node] == path[-1] and tokens[node] == choice[path[-1]] and (alive is None or alive[node]):
                path.append(node)
        rest = tree.max_depth + 1 - len(path)
        chosen = [choice[node] for node in path]
        rows.append([len(path), chosen[-1], *path, *[-1] * rest, *chosen, *[choice[0]] * rest])
    return choices.new_tensor(rows)


def greedy(scores: Tensor) -> Tensor:
    """Argmax, the lowest token id on ties: (batch, nodes, vocab) float -> (batch, nodes) int64."""
    if cpu_library.in_use(scores):
        return cpu.greatest(scores, 1)[1][..., 0]
    return scores.max(-1).indices  # equals argmax, including ties; three times as fast on a CPU


@kernels.operation()
def choose_drawn(tree: TokenTree, probs: Tensor, chances: Tensor, last: Tensor) -> Tensor:
    """Token after each of the first nodes by recursive rejection sampling of its children, in draw order.

    Child x, drawn from q, is accepted with probability min(1, p(x) / q(x)); on rejection p <- norm(max(p - q, 0)), and
    q loses x and is renormalised. If no child is accepted, the token is sampled from the final p.

    Args:
        tree: ``draft_probs`` are q, (batch, first, vocab) float; valid nodes are children of the first ``first``.
        probs: (batch, first, vocab) float, p.
        chances: (batch, nodes) float, uniform in [0, 1), for accepting each node.
        last: (batch, first) float, uniform in [0, 1), for sampling after a node whose children are all rejected.

    Returns:
        (batch, first) int64.

    Source: SpecInfer (arXiv 2305.09781, alg. 2); without replacement: arXiv 2402.14160.
    """
    assert tree.draft_probs is not None
    p, q = probs.clone(), tree.draft_probs.clone()
    choice, row = torch.full(last.shape, -1, device=p.device), torch.arange(tree.batch, device=p.device)
    for node in range(1, tree.nodes):  # in draw order among siblings, without reading the tree on the host
        at, token = (row, tree.parents[:, node]), tree.tokens[:, node]
        p_left, q_left, chosen = p[at], q[at], choice[at]
        pending = chosen < 0 if tree.valid is None else (chosen < 0) & tree.valid[:, node]
        if p.device.type == "cpu" and not pending.any():
            continue
        accept = pending & (chances[:, node] * q_left[row, token] < p_left[row, token])
        choice[at] = torch.where(accept, token, chosen)
        reject = (pending & ~accept)[:, None]
        residual = _normalise((p_left - q_left).clamp(min=0), otherwise=p_left)
        p[at] = torch.where(reject, residual, p_left)
        without = _normalise(q_left.scatter(-1, token[:, None], 0.0), otherwise=q_left)
        q[at] = torch.where(reject, without, q_left)
    return torch.where(choice < 0, quantile(p, last), choice)


@kernels.operation()
def quantile(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token at which the cumulative distribution exceeds ``uniform``.

    Args:
        probs: (..., vocab) float, not necessarily normalised.
        uniform: (...) float in [0, 1).

    Returns:
        (...) int64, never a token of probability 0.
    """
    exact = torch.float32 if probs.device.type == "mps" else torch.float64
    total = probs.to(exact).cumsum(-1)
    token = torch.searchsorted(total, (uniform.to(exact) * total[..., -1])[..., None], right=True)[..., 0]
    return token.clamp(max=probs.shape[-1] - 1)


def sample(scores: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling from softmax(scores), see ``quantile``: (..., vocab) and (...) float -> (...) int64."""
    if cpu_library.in_use(scores):
        return cpu.quantile(scores, uniform)
    return quantile(scores.softmax(-1), uniform)


def _normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Normalise the last axis; rows of zeros (p = q up to rounding) are replaced by rows of ``otherwise``."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), otherwise)


def _check(storage: Tensor, path: Tensor, start: int | Tensor, lengths: Tensor) -> None:
    if storage.ndim != 5 or path.ndim != 2 or path.shape[0] != storage.shape[1] or lengths.shape != path.shape[:1]:
        raise ValueError(
            "expected storage (layers * 2, batch, kv_heads, slots, head_dim), path (batch, depth) and lengths "
            f"(batch,): got {tuple(storage.shape)}, {tuple(path.shape)} and {tuple(lengths.shape)}"
        )


@kernels.operation(_check)
def compact_kv(storage: Tensor, path: Tensor, start: int | Tensor, lengths: Tensor) -> None:
    """Move the KV slots of each row's path to the end of the row's prefix, in all layers, in place.

    Slot ``start + path[b, i]`` moves to ``lengths[b] + i``. Source and destination may overlap. The last slot of the
    buffer is a write sink for padding.

    Args:
        storage: (layers * 2, batch, kv_heads, slots, head_dim), keys and values of all layers.
        path: (batch, depth) int64, ascending node indices padded with -1 at the end; a row may be all -1.
        start: slot of node 0, at least every row's length; an int, or (1,) int on the device.
        lengths: (batch,) int, committed slots of each row.

    Raises:
        ValueError: shapes disagree.
    """
    slot = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
    source = start + path.clamp(min=0)
    if len(path) == 1 and path.device.type == "cpu" and int(path[0, -1]) >= 0:
        at = int(lengths)  # one row without padding: a slice write is faster than an indexed one
        storage[:, :, :, at : at + path.shape[1]] = storage[:, :, :, source[0]]
        return
    row = torch.arange(len(path), device=path.device)[:, None]
    slot = torch.where(path >= 0, slot, storage.shape[3] - 1)
    storage[:, row, :, slot] = storage[:, row, :, source]
