"""Batch of token trees in topological order.

Axes: ``batch`` rows are independent sequences, ``nodes`` are the nodes of a row's tree. Node 0 is the root: the last
emitted token, which is not in the target's cache yet. Parents precede their children; siblings are in the drafter's
order of preference, or in draw order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.ops import kernels
from mmspec.ops.growth import tree_ancestors
from mmspec.ops.transfer import on_device

_ROUNDING = 1e-3  # tolerance of log probabilities
_FEW_NODES = 32  # total nodes up to which host lists are faster than tensor operations


class TokenTree:
    """Drafted continuations of the last emitted token, one tree per batch row.

    Args:
        tokens: (batch, nodes) int64, the token at each node; ``tokens[:, 0]`` is the last emitted token.
        parents: (batch, nodes) int64, ``parents[b, 0] = -1`` and ``0 <= parents[b, i] < i``.
        valid: (batch, nodes) bool, False at padding of rows with fewer nodes; None means all are valid.
        draft_probs: (batch, nodes, vocab) float, entry i is the distribution that the children of node i were drawn
            from, without replacement, in node order; None if children were not drawn (top-k trees, n-grams).
        log_probs: (batch, nodes) float, the drafter's log probability of the path to each node: 0 at the root, else at
            most the parent's. Nodes are in descending order, padding last. None if unknown.
        check: False skips validation, for trees that are valid by construction.

    Attributes:
        levels: levels that the drafter computed one by one; drafters that do so set it.

    Raises:
        ValueError: shapes disagree, a parent does not point backwards, a valid node has a padded parent, or two
            siblings have the same token (a duplicate would bias sampling).
    """

    levels = 1

    def __init__(
        self,
        tokens: Tensor,
        parents: Tensor,
        valid: Tensor | None = None,
        draft_probs: Tensor | None = None,
        *,
        log_probs: Tensor | None = None,
        check: bool = True,
    ) -> None:
        self.tokens = tokens
        self.parents = parents
        self.valid = valid
        self.draft_probs = draft_probs
        self.log_probs = log_probs
        if check:
            self.check_shapes()
            self.check_values()
            _check_siblings(self)

    @classmethod
    def root(cls, token: Tensor) -> TokenTree:
        """Root-only tree, for plain decoding. ``token``: (batch,) int64."""
        tokens = token[:, None]
        tree = cls(tokens, torch.full_like(tokens, -1), check=False)
        tree.max_depth = 0
        return tree

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def alive(self) -> Tensor:
        """``valid``, or all True if it is None: (batch, nodes) bool."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid

    def check_shapes(self) -> None:
        """Raise ``ValueError`` if shapes disagree."""
        tokens, probs = self.tokens, self.draft_probs
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be (batch, nodes) with at least the root: got shape {tuple(tokens.shape)}")
        shape = tokens.shape
        for name, other in (("parents", self.parents), ("valid", self.valid), ("log_probs", self.log_probs)):
            if other is not None and other.shape != shape:
                raise ValueError(f"{name} must have the shape of tokens {tuple(shape)}: got {tuple(other.shape)}")
        if probs is not None and (probs.ndim != 3 or probs.shape[:2] != tokens.shape):
            raise ValueError(f"draft_probs must be (batch, nodes, vocab): got {tuple(probs.shape)}")

    def check_values(self) -> None:
        """Raise ``ValueError`` if parents do not point backwards to valid nodes, or probabilities are above 1."""
        # Lists: with cold CPU caches, one tensor operation takes the time of a loop over a hundred nodes.
        valid, log_probs = (None if part is None else part.tolist() for part in (self.valid, self.log_probs))
        for b, parents in enumerate(self.parents.tolist()):
            alive = None if valid is None else valid[b]
            if alive and not alive[0]:
                raise ValueError("the root must be valid in every row")
            for i, parent in enumerate(parents):
                if not (0 <= parent < i if i else parent == -1):
                    expected = f">= 0 and < {i}" if i else "-1"
                    raise ValueError(f"parents must point backwards: parents[{b}, {i}] = {parent}, expected {expected}")
                if alive and i and alive[i] and not alive[parent]:
                    raise ValueError(
                        f"a valid node requires a valid parent: node [{b}, {i}] has the padded parent {parent}"
                    )
            scores = [] if log_probs is None else log_probs[b]
            if not all(score < _ROUNDING for i, score in enumerate(scores) if alive is None or alive[i]):
                raise ValueError(f"log_probs must be at most 0: got {max(scores)}")

    @cached_property
    def ancestors(self) -> Tensor:
        """(batch, nodes, nodes) bool: [b, i, j] is True if j is i or an ancestor of i."""
        if self.nodes == 1:
            return torch.ones(self.batch, 1, 1, dtype=torch.bool, device=self.tokens.device)
        if self.tokens.numel() <= _FEW_NODES and not kernels.static_shapes(self.tokens.device):
            return torch.tensor([_ancestors(parents) for parents in self.parents.tolist()], dtype=torch.bool)
        return self._ancestors_and_depth[0]

    @cached_property
    def _ancestors_and_depth(self) -> tuple[Tensor, Tensor]:
        return tree_ancestors(self.parents)

    @cached_property
    def depth(self) -> Tensor:
        """(batch, nodes) int64, depth of each node."""
        if "_ancestors_and_depth" in vars(self) or kernels.static_shapes(self.tokens.device):
            return self._ancestors_and_depth[1]
        return self.ancestors.sum(-1) - 1

    @cached_property
    def max_depth(self) -> int:
        """Maximum depth of any row. Drafters may set it to save a device-to-host copy."""
        return int(self.depth.max())

    @cached_property
    def drafted(self) -> list[int]:
        """Drafted nodes per row, without root and padding. Drafters may set it to save a device-to-host copy."""
        if self.valid is None:
            return [self.nodes - 1] * self.batch
        return (self.valid.sum(1) - 1).tolist()

    @cached_property
    def children(self) -> list[list[dict[int, int]]]:
        """Per row and node, ``{token: node}`` of its valid children in order; one device-to-host copy."""
        if self.nodes == 1:
            return [[{}] for _ in range(self.batch)]
        children: list[list[dict[int, int]]] = []
        for tokens, parents, alive in torch.stack([self.tokens, self.parents, self.alive.long()], dim=1).tolist():
            children.append([{} for _ in tokens])
            for node in range(1, self.nodes):
                if alive[node]:
                    children[-1][parents[node]][tokens[node]] = node
        return children

    @property
    def prunable(self) -> bool:
        """Whether nodes may be pruned by probability; drawn nodes may not."""
        return self.nodes > 1 and self.log_probs is not None and self.draft_probs is None

    @cached_property
    def path_probs(self) -> list[list[float]]:
        """Per row, path probabilities of drafted nodes in descending order, without padding and zeros.

        Drafters may set it to save a device-to-host copy.
        """
        if self.nodes == 1:
            return [[] for _ in range(self.batch)]
        assert self.log_probs is not None, "the drafter has no probabilities"
        rows = self.log_probs[:, 1:].exp().tolist()
        return [[p for p in row[:drafted] if p > 0.0] for row, drafted in zip(rows, self.drafted, strict=True)]

    def select(self, rows: Sequence[int]) -> TokenTree:
        """Trees of some rows."""
        tree = self._indexed(rows)
        tree.max_depth = self.max_depth
        return tree

    def _indexed(self, index: Any) -> TokenTree:
        valid, probs, scores = (
            None if part is None else part[index] for part in (self.valid, self.draft_probs, self.log_probs)
        )
        return TokenTree(self.tokens[index], self.parents[index], valid, probs, log_probs=scores, check=False)

    def without(self, rows: Sequence[int]) -> TokenTree:
        """Reduce the trees of some rows to the root."""
        root = torch.arange(self.nodes, device=self.tokens.device) == 0
        dropped = on_device([[row in rows] for row in range(self.batch)], root.device) & ~root
        scores = None if self.log_probs is None else self.log_probs.masked_fill(dropped, -torch.inf)
        tree = TokenTree(
            self.tokens, self.parents, self.alive & ~dropped, self.draft_probs, log_probs=scores, check=False
        )
        tree.max_depth = self.max_depth
        tree.drafted = [0 if row in rows else drafted for row, drafted in enumerate(self.drafted)]
        return tree

    def best_chain(self) -> TokenTree:
        """Chain of most probable children per row, for nodes in descending order."""
        rows, probs = [], []
        for tokens, parents, gains in zip(self.tokens.tolist(), self.parents.tolist(), self.path_probs, strict=True):
            path = [0]
            for node in range(1, 1 + len(gains)):
                if parents[node] == path[-1]:
                    path.append(node)
            rows.append(([tokens[node] for node in path[1:]], list(range(len(path) - 1))))
            probs.append([gains[node - 1] for node in path[1:]])
        return build_tree(self.tokens[:, 0], rows, probs)

    def first(self, nodes: int) -> TokenTree:
        """Tree of the first ``nodes`` nodes, including the root: the most probable nodes if there are ``log_probs``."""
        if nodes >= self.nodes:
            return self
        if nodes == 1:
            return TokenTree.root(self.tokens[:, 0])
        tree = self._indexed((slice(None), slice(nodes)))
        if "path_probs" in vars(self):
            tree.path_probs = [row[: nodes - 1] for row in self.path_probs]
        if "drafted" in vars(self):
            tree.drafted = [min(drafted, nodes - 1) for drafted in self.drafted]
            tree.valid = None if min(tree.drafted) == nodes - 1 else tree.valid
        return tree

    def __repr__(self) -> str:
        return f"TokenTree(batch={self.batch}, nodes={self.nodes}, drawn={self.draft_probs is not None})"


def _ancestors(parents: list[int]) -> list[list[bool]]:
    """``TokenTree.ancestors`` for one row."""
    rows: list[list[bool]] = []
    for node, parent in enumerate(parents):
        rows.append(list(rows[parent]) if node else [False] * len(parents))
        rows[node][node] = True
    return rows


def build_tree(
    token: Tensor, rows: Sequence[tuple[list[int], list[int]]], path_probs: list[list[float]] | None = None
) -> TokenTree:
    """Build a batched tree from ragged rows on the host.

    Args:
        token: (batch,) int64, the roots.
        rows: per row ``(tokens, parents)`` of the drafted nodes; parents are node indices, the root is 0.
        path_probs: per row the path probability of each drafted node, in descending order.
    """
    widest = max(len(tokens) for tokens, _ in rows)
    if widest == 0:
        return TokenTree.root(token)
    ids, parents, valid, deepest = [], [], [], 0
    for tokens, above in rows:
        spare = widest - len(tokens)
        depth = [0]
        for parent in above:
            depth.append(depth[parent] + 1)
        deepest = max(deepest, *depth)
        ids.append(tokens + [0] * spare)
        parents.append([-1, *above, *[0] * spare])
        valid.append([True] * (1 + len(tokens)) + [False] * spare)
    device = token.device
    drafted = on_device(ids, device)
    ragged = any(len(tokens) < widest for tokens, _ in rows)
    tree = TokenTree(
        torch.cat([token[:, None], drafted], dim=1),
        on_device(parents, device),
        on_device(valid, device) if ragged else None,
        check=False,
    )
    tree.max_depth = deepest
    tree.drafted = [len(tokens) for tokens, _ in rows]
    if path_probs is not None:
        padded = [[1.0, *row, *[0.0] * (widest - len(row))] for row in path_probs]
        tree.log_probs, tree.path_probs = on_device(padded, device, torch.float32).log(), path_probs
    return tree


def _check_siblings(tree: TokenTree) -> None:
    tokens, parents, alive = tree.tokens, tree.parents, tree.alive
    same = (parents[:, :, None] == parents[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
    same = (same & alive[:, :, None] & alive[:, None, :]).tril(-1)
    if same.any():
        b, i, j = same.nonzero()[0].tolist()
        raise ValueError(
            f"siblings must have different tokens: nodes [{b}, {j}] and [{b}, {i}] are {int(tokens[b, i])}"
        )


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Union of trees with the same roots.

    A path that occurs in several trees gets the maximum of its probabilities. With static shapes, this takes a few
    tensor operations of size (batch, nodes of first tree, nodes of second tree), without host syncs.

    Args:
        trees: one or more trees with ``log_probs`` and without ``draft_probs``.

    Returns:
        A tree in descending order of ``log_probs``, padding last.

    Raises:
        ValueError: no trees, different batch sizes, or a tree that was drawn or has no probabilities.
    """
    trees = _mergeable(trees)
    if len(trees) == 1:
        return trees[0]
    return reduce(_merge_two, trees) if kernels.static_shapes(trees[0].tokens.device) else _merge_on_host(trees)


def best_chains(trees: Sequence[TokenTree]) -> TokenTree:
    """For each row, select the chain with the most expected tokens; chains have the same root. No host sync. Arguments
    and errors as for ``merge``."""
    trees = _mergeable(trees)
    if len(trees) == 1:
        return trees[0]
    nodes, rows = max(tree.nodes for tree in trees), torch.arange(trees[0].batch, device=trees[0].tokens.device)
    padded = []
    for tree in trees:
        assert tree.log_probs is not None
        filled = (tree.tokens, 0), (tree.alive, False), (tree.log_probs, -torch.inf)
        padded.append([F.pad(values, (0, nodes - tree.nodes), value=fill) for values, fill in filled])
    stacked = [torch.stack(values) for values in zip(*padded, strict=True)]  # (trees, batch, nodes)
    stacked[1] &= stacked[2] > -torch.inf
    best = stacked[2].exp().where(stacked[1], 0.0).sum(-1).argmax(0)
    tokens, alive, log_probs = (values[best, rows] for values in stacked)
    parents = torch.arange(-1, nodes - 1, device=tokens.device).where(alive, 0)
    parents[:, 0] = -1
    tree = TokenTree(tokens, parents, alive, log_probs=log_probs, check=False)
    tree.max_depth = nodes - 1
    return tree


def _mergeable(trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
    """Trees with more than a root, or a single root-only tree; raises the errors of ``merge``."""
    if not trees:
        raise ValueError("merge requires at least one tree: got none")
    for number, tree in enumerate(trees):
        if tree.nodes > 1 and (tree.draft_probs is not None or tree.log_probs is None):
            what = "draft_probs" if tree.draft_probs is not None else "no log_probs"
            raise ValueError(f"merged trees must have log_probs and no draft_probs: trees[{number}] has {what}")
        if tree.batch != trees[0].batch:
            raise ValueError(f"merged trees must have one batch size: got {trees[0].batch} and {tree.batch}")
    return [tree for tree in trees if tree.nodes > 1] or trees[:1]


def _merge_on_host(trees: Sequence[TokenTree]) -> TokenTree:
    rows, probs = [], []
    parts = [zip(tree.tokens.tolist(), tree.parents.tolist(), tree.path_probs, strict=True) for tree in trees]
    for row in zip(*parts, strict=True):
        tokens, parents, scores = [row[0][0][0]], [-1], [1.0]
        places: dict[tuple[int, int], int] = {}  # index of a token below a node
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
        same[:, 0, 1:] = same[:, 1:, 0] = False  # the root's parent is clamped to 0
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
    index = torch.arange(order.shape[1], device=order.device).expand_as(order)
    moved = torch.empty_like(order).scatter_(1, order, index)
    alive = alive.gather(1, order)
    parents = moved.gather(1, parents.gather(1, order).clamp(min=0)).where(alive, 0)
    parents[:, 0] = -1
    merged = TokenTree(tokens.gather(1, order), parents, alive, log_probs=scores, check=False)
    merged.max_depth = max(a.max_depth, b.max_depth)
    return merged
