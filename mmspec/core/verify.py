"""Tree verification: greedy and lossless sampling.

Both choose the target's next token at every node, in parallel, then walk from the root: if a child has the chosen
token, the walk continues there; otherwise the token is the bonus token.

For fixed trees (``draft_probs is None``), a node's token is sampled from the target's distribution p. This equals
"accept child x with probability p(x), else p(x) = 0, renormalise, next child", because trying children in any order and
then sampling from the rest samples from p.

For drawn trees, it is chosen by recursive rejection sampling (SpecInfer, arXiv 2305.09781, alg. 2; without replacement:
arXiv 2402.14160): child x, drawn from q, is accepted with probability min(1, p(x) / q(x)); on rejection
p <- norm(max(p - q, 0)), and q loses x and is renormalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mmspec import ops
from mmspec.core.tree import TokenTree


@dataclass(frozen=True)
class Verdict:
    """Result of verification: the accepted path and the bonus token of each row.

    Attributes:
        packed: (batch, 2 + 2 * (max_depth + 1)) int64: length, bonus, path and tokens, for one device-to-host copy.
    """

    packed: Tensor

    @property
    def length(self) -> Tensor:
        """(batch,) int64, number of nodes on the path, including the root."""
        return self.packed[:, 0]

    @property
    def bonus(self) -> Tensor:
        """(batch,) int64, bonus token: the target's token after the path."""
        return self.packed[:, 1]

    @property
    def path(self) -> Tensor:
        """(batch, max_depth + 1) int64, node indices of the accepted path, root first, padded with -1."""
        return self.packed[:, 2 : 2 + self.width]

    @property
    def tokens(self) -> Tensor:
        """(batch, max_depth + 1) int64, emitted tokens: accepted drafts, then the bonus; undefined after ``length``."""
        return self.packed[:, 2 + self.width :]

    @property
    def width(self) -> int:
        """Maximum path length."""
        return self.packed.shape[1] // 2 - 1

    @cached_property
    def host(self) -> list[tuple[list[int], list[int]]]:
        """Per row ``(path, tokens)`` as Python lists of equal length; the only device-to-host copy of a step."""
        start = 2 + self.width
        return [(row[2 : 2 + row[0]], row[start : start + row[0]]) for row in self.packed.tolist()]

    def accepted(self) -> list[int]:
        """Number of nodes on each row's path; requires the copy of ``host``."""
        return [len(path) for path, _ in self.host]


def accept_path(tree: TokenTree, choices: Tensor) -> Verdict:
    """Accept the longest path on which every token is the target's choice after its parent.

    Args:
        choices: (batch, nodes) int64, the target's token after each node (its argmax, for greedy decoding).

    Raises:
        ValueError: the shapes of ``choices`` and tree differ.
    """
    if choices.shape != tree.tokens.shape:
        raise ValueError(f"choices must be (batch, nodes) = {tuple(tree.tokens.shape)}: got {tuple(choices.shape)}")
    return Verdict(ops.accepted_path(tree, choices))


def verify(tree: TokenTree, probs: Tensor, *, generator: torch.Generator | None = None) -> Verdict:
    """Accept a path such that the emitted tokens follow the target's distribution.

    Args:
        tree: the draft; ``tree.draft_probs`` selects one of the two algorithms above.
        probs: (batch, nodes, vocab) float, the target's distribution after each node, after all logits processors.
        generator: random generator on the device of ``probs``.

    Raises:
        ValueError: ``probs`` does not match the tree or its ``draft_probs``.
    """
    if probs.shape[:2] != tree.tokens.shape:
        raise ValueError(
            f"probs must be (batch, nodes, vocab) for the tree's {tuple(tree.tokens.shape)}: got {tuple(probs.shape)}"
        )
    if tree.draft_probs is None:
        return accept_path(tree, ops.quantile(probs, _uniforms(tree.tokens.shape, probs, generator)))
    if tree.draft_probs.shape != probs.shape:
        raise ValueError(
            f"draft_probs must have the shape of probs {tuple(probs.shape)}: got {tuple(tree.draft_probs.shape)}"
        )
    # Per node: one number to accept it, one to sample after all its children are rejected.
    chances, last = _uniforms((2, *tree.tokens.shape), probs, generator)
    return accept_path(tree, ops.choose_drawn(tree, probs, chances, last))


def _uniforms(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype)
