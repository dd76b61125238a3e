"""Union of token trees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from mmspec.core.tree import TokenTree, build_tree
from mmspec.ops import kernels


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Union of trees with the same roots.

    A path of several trees gets the maximum of its probabilities. With static shapes this costs a few tensor operations
    of size (batch, nodes of one tree, nodes of the other), and no host sync.

    Args:
        trees: at least one; each with ``log_probs`` and without ``draft_probs``.

    Returns:
        A tree in descending order of ``log_probs``, padding last.

    Raises:
        ValueError: no trees, different batch sizes, or a tree that was drawn or has no probabilities.
    """
    if not trees:
        raise ValueError("merge requires at least one tree: got none")
    for number, tree in enumerate(trees):
        if tree.nodes > 1 and (tree.draft_probs is not None or tree.log_probs is None):
            what = "draft_probs" if tree.draft_probs is not None else "no log_probs"
            raise ValueError(f"merged trees must have log_probs and no draft_probs: trees[{number}] has {what}")
        if tree.batch != trees[0].batch:
            raise ValueError(f"merged trees must have one batch size: got {trees[0].batch} and {tree.batch}")
    trees = [tree for tree in trees if tree.nodes > 1] or trees[:1]
    if len(trees) == 1:
        return trees[0]
    return reduce(_merge_two, trees) if kernels.static_shapes(trees[0].tokens.device) else _merge_on_host(trees)


def _merge_on_host(trees: Sequence[TokenTree]) -> TokenTree:
    rows, probs = [], []
    parts = [zip(tree.tokens.tolist(), tree.parents.tolist(), tree.path_probs, strict=True) for tree in trees]
    for row in zip(*parts, strict=True):
        tokens, parents, scores = [row[0][0][0]], [-1], [1.0]
        places: dict[tuple[int, int], int] = {}  # of a token below a node
        for more, above, gains in row:
            index = [0]
            for token, parent, gain in zip(more[1:], above[1:], gains, strict=False):
                place = places.setdefault((index[parent], token), len(tokens))
                if place == len(tokens):
                    tokens.append(token)
                    parents.append(index[parent])
                    scores.append(gain)
                scores[place] = max(scores[place], gain)
                index.append(place)
        # A stable sort keeps parents before their children.
        order = sorted(range(1, len(tokens)), key=lambda node: -scores[node])
        moved = dict(zip([0, *order], range(len(tokens)), strict=True))
        rows.append(([tokens[node] for node in order], [moved[parents[node]] for node in order]))
        probs.append([scores[node] for node in order])
    return build_tree(trees[0].tokens[:, 0], rows, probs)


def _merge_two(a: TokenTree, b: TokenTree) -> TokenTree:
    assert a.log_probs is not None
    assert b.log_probs is not None
    # same[i, j]: node i of a and node j of b have equal paths.
    root = torch.zeros(a.batch, a.nodes, b.nodes, dtype=torch.bool, device=a.tokens.device)
    root[:, 0, 0] = True
    alike = (a.tokens[:, :, None] == b.tokens[:, None]) & a.alive[:, :, None] & b.alive[:, None]
    above = a.parents.clamp(min=0)[:, :, None].expand_as(root), b.parents.clamp(min=0)[:, None].expand_as(root)
    same = root
    for _ in range(min(a.max_depth, b.max_depth)):
        same = root | (alike & same.gather(1, above[0]).gather(2, above[1]))
        same[:, 0, 1:] = same[:, 1:, 0] = False  # a root's parent is clamped to itself
    twin = same.any(1)  # (batch, nodes of b)
    index = torch.arange(a.nodes - 1, a.nodes + b.nodes - 1, device=root.device)
    place = torch.where(twin, same.int().argmax(1), index)  # index of each node of b among all nodes
    both = torch.where(same, b.log_probs[:, None], -torch.inf).amax(2)
    scores = torch.cat([torch.maximum(a.log_probs, both), b.log_probs[:, 1:]], dim=1)
    alive = torch.cat([a.alive, (b.alive & ~twin)[:, 1:]], dim=1) & (scores > -torch.inf)
    tokens = torch.cat([a.tokens, b.tokens[:, 1:]], dim=1)
    parents = torch.cat([a.parents, place.gather(1, b.parents[:, 1:])], dim=1)
    # A stable sort keeps parents before their children.
    scores, order = scores.masked_fill(~alive, -torch.inf).sort(dim=1, descending=True, stable=True)
    moved = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    alive = alive.gather(1, order)
    parents = moved.gather(1, parents.gather(1, order).clamp(min=0)).where(alive, 0)
    parents[:, 0] = -1
    merged = TokenTree(tokens.gather(1, order), parents, alive, log_probs=scores, check=False)
    merged.max_depth = max(a.max_depth, b.max_depth)
    return merged
