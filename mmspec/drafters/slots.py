"""Trees over slots that one pass predicts, a level per slot; the most probable paths form the tree.

Where slots are independent of each other, all nodes of a level have the same children (DDTree, arXiv 2604.12989).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.tree import TokenTree, build_tree
from mmspec.drafters.growth import best_first, grow_tree
from mmspec.ops import kernels

_LEAST = 1e-30
"""Least probability of a path on the host, where it must not be 0."""


def grow_slots(token: Tensor, tokens: Tensor, log_probs: Tensor, budget: Budget, nodes: int) -> TokenTree:
    """Grow the tree of the most probable paths over independent slots, one per row.

    It is grown best first on the host, or with static shapes and without host syncs, which gives the same tree.

    Args:
        token: (batch,) int64, the roots.
        tokens: (batch, slots, top_k) int64, of each level in descending order.
        log_probs: (batch, slots, top_k), theirs.
    """
    if kernels.static_shapes(token.device):
        return _grow_on_device(token, tokens, log_probs, budget, nodes)
    most, deepest = min(nodes, budget.nodes), tokens.shape[1]
    levels = zip(tokens.tolist(), log_probs.exp().tolist(), strict=True)
    rows = [best_first(0, partial(_children, *row), deepest, most, _LEAST) for row in levels]
    return build_tree(token, [(ids, parents) for ids, parents, _ in rows], [probs for _, _, probs in rows])


def _grow_on_device(token: Tensor, tokens: Tensor, log_probs: Tensor, budget: Budget, nodes: int) -> TokenTree:
    def children(level: int, parents: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        shared = (-1, parents.shape[1], -1)
        return tokens[:, level, None].expand(shared), log_probs[:, level, None].expand(shared)

    # Each node with children needs another one below it: a beam of half the tree is exact.
    return grow_levels(token, children, budget, max(1, nodes // 2), depth=tokens.shape[1], nodes=nodes)


def grow_levels(
    token: Tensor,
    children: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
    budget: Budget,
    top_k: int,
    *,
    depth: int,
    nodes: int,
) -> TokenTree:
    """Grow a tree level by level, where the children of a node depend on its token; see ``grow_tree``.

    Args:
        token: (batch,) int64, the roots.
        children: given a level, from 0 on, its parents' tokens, (batch, width) int64, and the place of each parent's
            own parent among those of the level before, (batch, width) int64, returns their children as
            ``(tokens, log_probs)``, (batch, width, children) each, in descending order.
        top_k: nodes extended per level.
    """
    levels = count()
    return grow_tree(
        token,
        None,
        lambda beam, origin: children(next(levels), beam, origin),
        budget,
        top_k,
        depth=depth,
        nodes=nodes,
    )


def _children(tokens: list[list[int]], probs: list[list[float]], level: int) -> Iterator[tuple[int, float, int]]:
    """Children of every node of a level, see ``best_first``."""
    return ((token, prob, level + 1) for token, prob in zip(tokens[level], probs[level], strict=True))
