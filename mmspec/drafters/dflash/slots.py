"""Trees over slots that are predicted independently of each other (DDTree, arXiv 2604.12989).

All nodes of a level have the same children, so that no pass is needed between levels; the most probable paths form the
tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.tree import TokenTree, build_tree
from mmspec.drafters.growth import best_first, grow_tree

_LEAST = 1e-30
"""Least probability of a path on the host, where it must not be 0."""


def grow_on_host(token: Tensor, tokens: Tensor, log_probs: Tensor, budget: Budget, nodes: int) -> TokenTree:
    """Grow the tree of the most probable paths, one per row, best first.

    Args:
        token: (batch,) int64, the roots.
        tokens: (batch, slots, top_k) int64, of each level in descending order.
        log_probs: (batch, slots, top_k), theirs.
        budget: limits the size.
        nodes: limit of the drafter.
    """
    most, deepest = min(nodes, budget.nodes), tokens.shape[1]
    levels = zip(tokens.tolist(), log_probs.exp().tolist(), strict=True)
    rows = [best_first(0, partial(_children, *row), deepest, most, _LEAST) for row in levels]
    return build_tree(token, [(ids, parents) for ids, parents, _ in rows], [probs for _, _, probs in rows])


def grow_on_device(token: Tensor, tokens: Tensor, log_probs: Tensor, budget: Budget, nodes: int) -> TokenTree:
    """The same trees with static shapes and without host syncs; see ``grow_on_host``."""
    levels = iter(range(1, tokens.shape[1]))

    def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        level = next(levels)
        shared = (-1, beam.shape[1], -1)
        return tokens[:, level, None].expand(shared), log_probs[:, level, None].expand(shared)

    # Each node with children needs another one below it: a beam of half the tree is exact.
    beam = max(1, nodes // 2)
    first = tokens[:, 0], log_probs[:, 0]
    return grow_tree(token, first, extend, budget, beam, depth=tokens.shape[1], nodes=nodes)


def _children(tokens: list[list[int]], probs: list[list[float]], level: int) -> Iterator[tuple[int, float, int]]:
    """Children of every node of a level, see ``best_first``."""
    return ((token, prob, level + 1) for token, prob in zip(tokens[level], probs[level], strict=True))
