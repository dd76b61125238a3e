"""Which drafted tokens the target itself would have produced.

Both rules reduce to one question per node, answered for all nodes at once: which token does the target put after this
node? Where a child carries that token the walk goes on into the child; where none does, the token is the bonus.

For trees fixed before any draw (``draft_probs is None``) the question is answered by one draw from the target's
distribution p. That is the rule "accept child x with probability p(x), else p(x) = 0, renormalise, next child": trying
the children in any order and drawing from what remains is a way to draw from p.

For drawn trees it is recursive rejection sampling (SpecInfer, arXiv 2305.09781, alg. 2; without replacement as in
arXiv 2402.14160): child x, drawn from q, is accepted with probability min(1, p(x) / q(x)); on rejection
p <- norm(max(p - q, 0)), and q loses x and is renormalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mmspec import ops
from mmspec.speculation.tree import TokenTree


@dataclass(frozen=True)
class Verdict:
    """What a step keeps.

    Attributes:
        packed: (batch, 2 + 2 * (max_depth + 1)) int64, length, bonus, path and tokens side by side, so that one copy
            brings all of them to the host.
    """

    packed: Tensor

    @property
    def length(self) -> Tensor:
        """(batch,) int64, nodes on the path, root included."""
        return self.packed[:, 0]

    @property
    def bonus(self) -> Tensor:
        """(batch,) int64, the target's token that follows the path."""
        return self.packed[:, 1]

    @property
    def path(self) -> Tensor:
        """(batch, max_depth + 1) int64, node indices of the accepted path, root first, padded with -1."""
        return self.packed[:, 2 : 2 + self.width]

    @property
    def tokens(self) -> Tensor:
        """(batch, max_depth + 1) int64, the tokens that the step emits: the accepted drafts, then the bonus; entries
        from ``length`` on mean nothing."""
        return self.packed[:, 2 + self.width :]

    @property
    def width(self) -> int:
        """The most nodes that a path can have."""
        return self.packed.shape[1] // 2 - 1

    @cached_property
    def host(self) -> list[tuple[list[int], list[int]]]:
        """Per row ``(path, tokens)`` as Python lists of equal length, by the one device-to-host copy of a step."""
        behind = 2 + self.width
        return [(row[2 : 2 + row[0]], row[behind : behind + row[0]]) for row in self.packed.tolist()]


def verify_greedy(tree: TokenTree, choices: Tensor) -> Verdict:
    """Keep the longest path on which every token is the target's choice after its parent.

    Args:
        tree: the draft.
        choices: (batch, nodes) int64, the token that the target puts after each node (its argmax, for greedy decoding).

    Raises:
        ValueError: ``choices`` has another shape than the tree.
    """
    if choices.shape != tree.tokens.shape:
        raise ValueError(f"choices must be (batch, nodes) = {tuple(tree.tokens.shape)}: got {tuple(choices.shape)}")
    return Verdict(ops.follow(tree, choices))


def verify(tree: TokenTree, probs: Tensor, *, generator: torch.Generator | None = None) -> Verdict:
    """Keep a path such that the emitted tokens are distributed as the target's own samples.

    Args:
        tree: the draft; ``tree.draft_probs`` decides between the two rules above.
        probs: (batch, nodes, vocab) float, the target's distribution after each node, with every logits processor and
            sampling parameter applied.
        generator: the source of randomness, on the device of ``probs``.

    Raises:
        ValueError: ``probs`` does not match the tree or its ``draft_probs``.
    """
    if probs.shape[:2] != tree.tokens.shape:
        raise ValueError(
            f"probs must be (batch, nodes, vocab) for the tree's {tuple(tree.tokens.shape)}: got {tuple(probs.shape)}"
        )
    if tree.draft_probs is None:
        return verify_greedy(tree, ops.quantile(probs, _uniforms(tree.tokens.shape, probs, generator)))
    if tree.draft_probs.shape != probs.shape:
        raise ValueError(
            f"draft_probs must have the shape of probs {tuple(probs.shape)}: got {tuple(tree.draft_probs.shape)}"
        )
    # One number decides about each node at its parent, another draws after a node whose children are all rejected.
    chances, last = _uniforms((2, *tree.tokens.shape), probs, generator)
    return verify_greedy(tree, ops.choose_drawn(tree, probs, chances, last))


def _uniforms(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype)
