"""Tree growth ops: top-k log probabilities, beam selection, final tree selection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.ops import cpu, cpu_library, kernels


@kernels.operation()
def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k tokens and their log probabilities, in descending order.

    Args:
        logits: (..., vocab) float.
        k: number of tokens, capped at the vocabulary size.

    Returns:
        Tokens (..., k) int64 and log probabilities (..., k) float32.
    """
    k = min(k, logits.shape[-1])
    if cpu_library.in_use(logits):
        best, tokens = cpu.greatest(logits, k, log_softmax=True)
    else:
        best, tokens = logits.float().log_softmax(-1).topk(k, dim=-1)  # faster than logsumexp on CPU
    return tokens, best


class Beam(NamedTuple):
    """The best nodes of a tree level, in descending order of score.

    Attributes:
        scores: (batch, width) float32, log probabilities of paths.
        tokens: (batch, width) int64.
        origin: (batch, width) int64, parent of each node in the previous level.
        places: (batch, width) int64, index of each node in its level, plus ``first``.
    """

    scores: Tensor
    tokens: Tensor
    origin: Tensor
    places: Tensor


@kernels.operation()
def next_beam(
    above: Tensor | None, log_probs: Tensor, tokens: Tensor, width: int, first: int = 0
) -> tuple[Tensor, Beam]:
    """Score a tree level and select its best nodes.

    Args:
        above: (batch, parents) float32, scores of the parents; None for the root, with score 0.
        log_probs: (batch, parents, children) float32, conditional log probabilities.
        tokens: (batch, parents, children) int64.
        width: beam width, capped at the number of nodes.
        first: added to the places.

    Returns:
        Scores of all nodes, (batch, parents * children), and the beam.
    """
    width = min(width, log_probs.shape[1] * log_probs.shape[2])
    scores = (log_probs if above is None else above[:, :, None] + log_probs).flatten(1)
    best, at = scores.topk(width, dim=1)
    return scores, Beam(best, tokens.flatten(1).gather(1, at), at // tokens.shape[2], at + first)


@kernels.operation()
def extend_reach(reach: Tensor, origin: Tensor) -> Tensor:
    """Extend the attention mask by a tree level: nodes attend to the entries of their parents and to themselves.

    Args:
        reach: (batch, parents, entries) bool.
        origin: (batch, width) int64, parent of each node.

    Returns:
        (batch, width, entries + width) bool.
    """
    above = reach.gather(1, origin[:, :, None].expand(-1, -1, reach.shape[2]))
    own = torch.eye(origin.shape[1], dtype=torch.bool, device=reach.device)
    return torch.cat([above, own.expand(len(origin), -1, -1)], dim=2)


@kernels.operation()
def node_inputs(table: Tensor, tokens: Tensor, states: Tensor, origin: Tensor, ids: Tensor | None = None) -> Tensor:
    """Concatenate embeddings of tokens with the states that predicted them.

    Args:
        table: (vocab, hidden) float, embeddings.
        tokens: (batch, width) int64.
        states: (batch, parents, any), of the dtype of ``table``.
        origin: (batch, width) int64, parent of each node.
        ids: (n,) int64, table row of each token; None is the identity.

    Returns:
        (batch, width, hidden + any).
    """
    taken = states.gather(1, origin[:, :, None].expand(-1, -1, states.shape[2]))
    return torch.cat([F.embedding(tokens if ids is None else ids[tokens], table), taken], dim=-1)


@kernels.operation()
def keep_best(
    root: Tensor, tokens: Tensor, places: Tensor | None, children: int, scores: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Build the tree of the top-scoring candidates.

    Args:
        root: (batch,) int64.
        tokens: (batch, candidates) int64, level by level: the root's children, then children of extended nodes.
        places: (batch, extended) int64, 1-based indices of candidates with children; None without.
        children: number of children of each extended candidate. These are the last candidates, in this order.
        scores: (batch, candidates) float32, not above the parent's score. Ties keep candidate order, so that a node's
            parent is always selected with it.
        nodes: number of nodes, capped at the number of candidates.

    Returns:
        Tokens and parents as in ``TokenTree``, and scores, 0 for the root, (batch, 1 + nodes) each, in descending order
        of score, so that every prefix is a tree.
    """
    nodes = min(nodes, scores.shape[1])
    score, order = scores.sort(dim=1, descending=True, stable=True)
    order = order[:, :nodes]
    # New index of each candidate (0 for the root).
    place = torch.zeros(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.long, device=tokens.device)
    place.scatter_(1, order + 1, torch.arange(1, nodes + 1, device=tokens.device).expand_as(order))
    parents = torch.zeros_like(tokens)
    if places is not None:
        parents[:, tokens.shape[1] - children * places.shape[1] :] = places.repeat_interleave(children, dim=1)
    above, root = place.gather(1, parents.gather(1, order)), root[:, None]
    kept = torch.cat([root, tokens.gather(1, order)], dim=1)
    return kept, torch.cat([torch.full_like(root, -1), above], dim=1), F.pad(score[:, :nodes], (1, 0))


@kernels.operation()
def tree_ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Ancestors and depth of each node.

    Args:
        parents: (batch, nodes) int64, -1 for the root; parents precede their children.

    Returns:
        (batch, nodes, nodes) bool: [b, i, j] is True if j is i or an ancestor of i; (batch, nodes) int64.
    """
    batch, nodes = parents.shape
    reach = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    jump = parents.clamp(min=0)
    span = 1  # pointer doubling
    while span < nodes:
        reach = reach | reach.gather(1, jump[:, :, None].expand(-1, -1, nodes))
        jump = jump.gather(1, jump)
        span *= 2
    return reach, reach.sum(-1) - 1


@kernels.operation()
def write_last(state: Tensor, outputs: Tensor, length: Tensor) -> None:
    """Set each row of ``state`` to its last valid output; rows without valid outputs keep their state.

    Args:
        state: (batch, n), written in place.
        outputs: (batch, width, n), in the dtype of ``state``.
        length: (batch,) int64, valid outputs of each row.
    """
    at = (length - 1).clamp(min=0)[:, None, None].expand(-1, -1, outputs.shape[2])
    state.copy_(torch.where(length[:, None] > 0, outputs.gather(1, at)[:, 0], state))
