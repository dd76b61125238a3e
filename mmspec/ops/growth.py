"""Tree growth ops: top-k log probabilities, beam selection, final tree selection."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.ops import cpu, cpu_library, kernels


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k tokens and their log probabilities, in descending order.

    Args:
        logits: (..., vocab) float.
        k: number of tokens, capped at the vocabulary size.

    Returns:
        Tokens (..., k) int64 and log probabilities (..., k) float32.
    """
    k = min(k, logits.shape[-1])
    return kernels.run(logits.device, _top_log_probs, logits, k)


def _top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if cpu_library.in_use(logits):
        best, tokens = cpu.greatest(logits, k, log_softmax=True)
    else:
        best, tokens = logits.float().log_softmax(-1).topk(k, dim=-1)  # on a CPU faster than logsumexp
    return tokens, best


def next_beam(scores: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top entries of a tree level, in descending order of score.

    Args:
        scores: (batch, entries) float32, log probabilities of paths.
        tokens: (batch, entries) int64.
        width: beam width, capped at the number of entries.

    Returns:
        Scores, tokens and entry indices, (batch, width) each.
    """
    width = min(width, scores.shape[1])
    return kernels.run(scores.device, _next_beam, scores, tokens, width)


def _next_beam(scores: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    best, at = scores.topk(width, dim=1)
    return best, tokens.gather(1, at), at


def keep_best(
    root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Build the tree of the top-scoring candidates.

    Args:
        root: (batch,) int64.
        tokens: (batch, candidates) int64, parents before their children.
        parents: (batch, candidates) int64, 0 for the root, i for the i-th candidate.
        scores: (batch, candidates) float32, not above the parent's score. Ties keep candidate order, so that a node's
            parent is always selected with it.
        nodes: number of nodes, capped at the number of candidates.

    Returns:
        Tokens and parents as in ``TokenTree``, (batch, 1 + nodes) int64, in descending order of score, so that every
        prefix is a tree; and the scores without the root, (batch, nodes).
    """
    nodes = min(nodes, scores.shape[1])
    return kernels.run(scores.device, _keep_best, root, tokens, parents, scores, nodes)


def _keep_best(
    root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    score, order = scores.sort(dim=1, descending=True, stable=True)
    order = order[:, :nodes]
    # New index of each candidate (0 for the root).
    place = torch.zeros(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.long, device=tokens.device)
    place.scatter_(1, order + 1, torch.arange(1, nodes + 1, device=tokens.device).expand_as(order))
    above, root = place.gather(1, parents.gather(1, order)), root[:, None]
    kept = torch.cat([root, tokens.gather(1, order)], dim=1)
    return kept, torch.cat([torch.full_like(root, -1), above], dim=1), score[:, :nodes]
