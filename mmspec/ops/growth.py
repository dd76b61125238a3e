"""What growing a tree costs beside the drafter's passes: likeliest tokens, the next beam, the nodes that are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.ops import kernels


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens and their log probabilities, likeliest first.

    Args:
        logits: (..., vocab) float.
        k: at most so many; fewer where the vocabulary is smaller.

    Returns:
        (..., k) int64 and (..., k) float32.
    """
    k = min(k, logits.shape[-1])
    if kernels.in_use(logits.device) == "triton":
        from mmspec.ops import triton_growth

        return triton_growth.top_log_probs(logits, k)
    best, tokens = logits.float().log_softmax(-1).topk(k, dim=-1)  # a logsumexp alone takes longer on a CPU
    return tokens, best


def next_beam(scores: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest entries of a level, likeliest first.

    Args:
        scores: (batch, entries) float32, log probabilities of paths.
        tokens: (batch, entries) int64.
        width: at most so many; fewer where the level is smaller.

    Returns:
        Their scores, tokens and numbers among the entries, (batch, width) each.
    """
    width = min(width, scores.shape[1])
    if kernels.in_use(scores.device) == "triton":
        from mmspec.ops import triton_growth

        return triton_growth.next_beam(scores, tokens, width)
    best, at = scores.topk(width, dim=1)
    return best, tokens.gather(1, at), at


def keep_best(
    root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tree of the likeliest candidates.

    Args:
        root: (batch,) int64.
        tokens: (batch, candidates) int64, a parent before its children.
        parents: (batch, candidates) int64, 0 the root, i the i-th candidate.
        scores: (batch, candidates) float32, at most a parent's. Of equal ones the first is preferred, so that no node
            is kept without its parent.
        nodes: at most so many; fewer where there are fewer candidates.

    Returns:
        Tokens and parents as ``TokenTree`` has them, (batch, 1 + nodes) int64 each, likeliest first, so that any number
        of nodes from the front form a tree; and the scores of all but the root, (batch, nodes).
    """
    nodes = min(nodes, scores.shape[1])
    if kernels.in_use(scores.device) == "triton":
        from mmspec.ops import triton_growth

        return triton_growth.keep_best(root, tokens, parents, scores, nodes)
    score, order = scores.sort(dim=1, descending=True, stable=True)
    order = order[:, :nodes]
    # Node numbers change with the order: position of each old node (root 0) in the new listing.
    place = torch.zeros(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.long, device=tokens.device)
    place.scatter_(1, order + 1, torch.arange(1, nodes + 1, device=tokens.device).expand_as(order))
    above, root = place.gather(1, parents.gather(1, order)), root[:, None]
    kept = torch.cat([root, tokens.gather(1, order)], dim=1)
    return kept, torch.cat([torch.full_like(root, -1), above], dim=1), score[:, :nodes]
