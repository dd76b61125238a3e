"""The draft: a batch of token trees in topological order.

Axes: ``batch`` rows are independent sequences, ``nodes`` the tree positions of a row. Node 0 is the root: the last
emitted token, which the target has not absorbed yet. A parent always stands before its children, and the order of
siblings is the order in which a drafter prefers (or drew) them.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class TokenTree:
    """Drafted continuations of the last emitted token, one tree per batch row.

    Args:
        tokens: (batch, nodes) int64, the token at each node; ``tokens[:, 0]`` is the last emitted token.
        parents: (batch, nodes) int64, ``parents[b, 0] = -1`` and ``0 <= parents[b, i] < i``.
        valid: (batch, nodes) bool, False marks padding of rows with fewer nodes; None means all are valid.
        draft_probs: (batch, nodes, vocab) float, row i being the distribution that the children of node i were drawn
            from, without replacement, in node order; None means that the children were fixed before any draw
            (top-k trees, n-grams).
        check: False skips the validation, for drafters whose trees are right by construction.

    Raises:
        ValueError: shapes disagree, a parent does not point backwards, a valid node has a padded parent, or two
            siblings carry the same token (a duplicate could be tried twice and would bias sampling).
    """

    def __init__(
        self,
        tokens: Tensor,
        parents: Tensor,
        valid: Tensor | None = None,
        draft_probs: Tensor | None = None,
        *,
        check: bool = True,
    ) -> None:
        self.tokens = tokens
        self.parents = parents
        self.valid = valid
        self.draft_probs = draft_probs
        if check:
            _validate(self)

    @classmethod
    def root(cls, token: Tensor) -> TokenTree:
        """The tree of one node, which makes a step plain decoding. ``token``: (batch,) int64."""
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

    @cached_property
    def ancestors(self) -> Tensor:
        """(batch, nodes, nodes) bool: [b, i, j] is True when j is i or an ancestor of i (pointer doubling)."""
        reach = torch.eye(self.nodes, dtype=torch.bool, device=self.tokens.device).expand(self.batch, -1, -1)
        jump = self.parents.clamp(min=0)
        span = 1
        while span < self.nodes:
            reach = reach | reach.gather(1, jump[:, :, None].expand(-1, -1, self.nodes))
            jump = jump.gather(1, jump)
            span *= 2
        return reach

    @cached_property
    def depth(self) -> Tensor:
        """(batch, nodes) int64: edges between the root and each node."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def max_depth(self) -> int:
        """The greatest depth of any row. A drafter that knows it sets it, which spares a device-to-host copy."""
        return int(self.depth.max())

    @cached_property
    def drafted(self) -> list[int]:
        """Drafted nodes of each row, root and padding left out. A drafter that knows them sets them, as above."""
        if self.valid is None:
            return [self.nodes - 1] * self.batch
        return (self.valid.sum(1) - 1).tolist()

    def __repr__(self) -> str:
        return f"TokenTree(batch={self.batch}, nodes={self.nodes}, drawn={self.draft_probs is not None})"


def _validate(tree: TokenTree) -> None:
    tokens, parents, valid, probs = tree.tokens, tree.parents, tree.valid, tree.draft_probs
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be (batch, nodes) with at least the root: got shape {tuple(tokens.shape)}")
    for name, other in (("parents", parents), ("valid", valid)):
        if other is not None and other.shape != tokens.shape:
            raise ValueError(f"{name} must have the shape of tokens {tuple(tokens.shape)}: got {tuple(other.shape)}")
    if probs is not None and (probs.ndim != 3 or probs.shape[:2] != tokens.shape):
        raise ValueError(f"draft_probs must be (batch, nodes, vocab): got {tuple(probs.shape)}")
    if valid is not None and not valid[:, 0].all():
        raise ValueError("the root must be valid in every row")

    index = torch.arange(tree.nodes, device=parents.device)
    wrong = (parents >= index) | (parents < torch.where(index == 0, -1, 0))
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        expected = "-1" if i == 0 else f">= 0 and < {i}"
        raise ValueError(f"parents must point backwards: parents[{b}, {i}] = {int(parents[b, i])}, expected {expected}")
    alive = torch.ones_like(parents, dtype=torch.bool) if valid is None else valid
    orphan = alive & ~alive.gather(1, parents.clamp(min=0))
    if orphan.any():
        b, i = orphan.nonzero()[0].tolist()
        raise ValueError(
            f"a valid node needs a valid parent: node [{b}, {i}] has the padded parent {int(parents[b, i])}"
        )

    same = (parents[:, :, None] == parents[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
    same = (same & alive[:, :, None] & alive[:, None, :]).tril(-1)
    if same.any():
        b, i, j = same.nonzero()[0].tolist()
        raise ValueError(
            f"siblings must carry different tokens: nodes [{b}, {j}] and [{b}, {i}] are {int(tokens[b, i])}"
        )
