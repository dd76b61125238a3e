"""Growing trees out of next-token guesses, likeliest nodes first.

``best_first`` is for drafters whose guesses are a look-up on the host, ``grow_tree`` for those that need a forward pass
per level. In both a child's path probability is at most its parent's and it is listed after it, so that any number of
nodes from the front form a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from mmspec import ops
from mmspec.ops import kernels
from mmspec.speculation.budget import Budget
from mmspec.speculation.tree import TokenTree

State = TypeVar("State")
Nodes = tuple[list[int], list[int], list[float]]
Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def best_first(
    root: State,
    children: Callable[[State], Iterable[tuple[int, float, State]]],
    depth: int,
    nodes: int,
    floor: float,
    width: int | None = None,
) -> Nodes:
    """The ``nodes`` likeliest nodes of a tree that is only looked at where it pays.

    Args:
        root: whatever ``children`` takes to stand for the root.
        children: ``(token, probability given the parent, state)`` of a node's children, tokens all different.
        depth: levels below the root at most.
        nodes: nodes at most.
        floor: path probability below which no node is wanted.
        width: children of a node at most, the likeliest ones; None takes all.

    Returns:
        Tokens, parents (0 is the root, i the i-th node listed) and path probabilities, most probable first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    gains: list[float] = []
    heap: list[tuple[float, int, int, int, int, State]] = []
    pushed, node, gain, level, state = 0, 0, 1.0, 0, root
    while True:
        if level < depth:
            found = children(state)
            if width is not None:
                found = heapq.nlargest(width, found, key=lambda child: child[1])
            for token, share, below in found:
                if gain * share >= floor:
                    # The running number makes ties come out in order, and keeps states from being compared.
                    pushed += 1
                    heapq.heappush(heap, (-gain * share, pushed, token, node, level + 1, below))
        if not heap or len(tokens) >= nodes:
            return tokens, parents, gains
        negative, _, token, parent, level, state = heapq.heappop(heap)
        node, gain = len(tokens) + 1, -negative
        tokens.append(token)
        parents.append(parent)
        gains.append(gain)


def grow_tree(
    token: Tensor,
    first: tuple[Tensor, Tensor],
    extend: Extend,
    budget: Budget,
    top_k: int,
    *,
    depth: int | None = None,
    nodes: int | None = None,
) -> TokenTree:
    """Grow one tree per row: the dynamic draft tree of EAGLE-2 (arXiv 2406.16858, section 4).

    Level by level, the ``top_k`` likeliest nodes are extended by their likeliest children; of everything seen, the
    nodes with the highest path probability are kept. On fixed shapes the depth is the budget's: to ask whether a level
    pays, the host would have to wait for its probabilities.

    Args:
        token: (batch,) int64, the roots.
        first: the root's children, ``(tokens, log_probs)``, (batch, children) each, likeliest first.
        extend: given the next beam's tokens, (batch, width), and which entry of the beam before each descends from,
            (batch, width), meaningless for the first beam, returns its children as ``(tokens, log_probs)``, each
            (batch, width, children).
        budget: bounds depth and size.
        top_k: nodes extended per level.
        depth, nodes: bounds of the drafter's own.
    """
    batch = token.shape[0]
    deepest = budget.max_depth if depth is None else min(depth, budget.max_depth)
    fixed = kernels.fixed_shapes(token.device)
    most = budget.nodes if nodes is None else min(nodes, budget.nodes)
    tokens, scores, extended = [first[0]], [first[1]], []
    seen, children = 0, first[0].shape[1]  # candidates above the last level, and how many of it share a parent
    for _ in range(1, deepest):
        score, beam, at = ops.next_beam(scores[-1], tokens[-1], top_k)
        if not fixed and not budget.deeper(float(score.exp().sum()) / batch):
            break
        child, log_prob = extend(beam, at // children)
        children = child.shape[2]
        extended.append(at + (1 + seen))
        seen += tokens[-1].shape[1]
        tokens.append(child.flatten(1))
        scores.append((score[:, :, None] + log_prob).flatten(1))
    levels = len(tokens) if deepest else 0
    parents = [torch.zeros_like(first[0])]
    if extended:
        parents.append(torch.cat(extended, 1).repeat_interleave(children, dim=1))
    candidates = torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1)
    kept, above, score = ops.keep_best(token, *candidates, most)
    if score.shape[1] == 0:
        return TokenTree.root(token)
    tree = TokenTree(kept, above, log_probs=torch.nn.functional.pad(score, (1, 0)), check=False)
    if fixed:
        tree.max_depth = min(levels, tree.nodes - 1)  # it may not reach as far, which is not worth asking
    return tree


class Reach:
    """Which entries of a drafter's cache behind the committed prefix each new entry attends to.

    Each beam of ``grow_tree`` that is fed to the drafter adds one entry per node, or ``stride`` entries per node, a
    chain of its own.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._reach: Tensor | None = None
        self._own = torch.empty(0, 0)

    def __call__(self, origin: Tensor) -> Tensor:
        """Feed a beam.

        Args:
            origin: (batch, width) int64, which node of the beam fed before each descends from; meaningless at first.

        Returns:
            (batch, width * stride, entries) bool: a node's chain, and those of its ancestors, of all entries so far.
        """
        batch, width = origin.shape
        if self._own.shape[1] != width * self._stride:
            own = torch.eye(width, dtype=torch.bool, device=origin.device)
            if self._stride > 1:
                chain = torch.ones(self._stride, self._stride, dtype=torch.bool, device=origin.device).tril()
                own = (own[:, None, :, None] & chain[None, :, None, :]).flatten(2).flatten(0, 1)
            self._own = own.expand(batch, -1, -1)
        if self._reach is None:
            self._reach = self._own
        else:
            ends = self._reach[:, self._stride - 1 :: self._stride]
            above = ends.gather(1, origin[:, :, None].expand(-1, -1, ends.shape[2]))
            if self._stride > 1:
                above = above.repeat_interleave(self._stride, dim=1)
            self._reach = torch.cat([above, self._own], dim=2)
        return self._reach
