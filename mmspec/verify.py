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

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmspec.tree import TokenTree


@dataclass(frozen=True)
class Verdict:
    """What a step keeps.

    Attributes:
        path: (batch, max_depth + 1) int64, node indices of the accepted path, root first, padded with -1.
        length: (batch,) int64, nodes on the path, root included.
        bonus: (batch,) int64, the target's token that follows the path.
        tokens: (batch, max_depth + 1) int64, the tokens that the step emits: the accepted drafts, then the bonus;
            entries from ``length`` on mean nothing.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    tokens: Tensor

    def only(self, rows: list[bool]) -> Verdict:
        """The same verdict, keeping nothing in the rows marked False (they have finished)."""
        if all(rows):
            return self
        keep = torch.tensor(rows, device=self.path.device)
        return replace(self, path=torch.where(keep[:, None], self.path, -1), length=self.length * keep)

    @cached_property
    def host(self) -> list[tuple[list[int], list[int]]]:
        """Per row ``(path, tokens)`` as Python lists of equal length, by the one device-to-host copy of a step."""
        packed = torch.cat([self.length[:, None], self.path, self.tokens], dim=1).tolist()
        width = self.path.shape[1]
        return [(row[1 : 1 + row[0]], row[1 + width : 1 + width + row[0]]) for row in packed]


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
    if tree.nodes == 1:
        zero = torch.zeros_like(choices)
        return Verdict(zero, zero[:, 0] + 1, choices[:, 0], choices)
    agrees = tree.tokens == choices.gather(1, tree.parents.clamp(min=0))
    agrees[:, 0] = True
    if tree.valid is not None:
        agrees &= tree.valid
    on_path = ~(tree.ancestors & ~agrees[:, None, :]).any(-1)  # siblings differ, so these nodes form one chain
    length = on_path.sum(1)
    last = torch.where(on_path, tree.depth, -1).argmax(1, keepdim=True)
    bonus = choices.gather(1, last)[:, 0]

    # A node off the path is written to a spare last column, which is cut off.
    width = tree.max_depth + 1
    column = torch.where(on_path, tree.depth, width)
    path = torch.full((tree.batch, width + 1), -1, device=choices.device)
    path = path.scatter(1, column, torch.arange(tree.nodes, device=choices.device).expand_as(column))[:, :-1]
    return Verdict(path, length, bonus, choices.gather(1, path.clamp(min=0)))


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
        return verify_greedy(tree, draw(probs, generator))
    if tree.draft_probs.shape != probs.shape:
        raise ValueError(
            f"draft_probs must have the shape of probs {tuple(probs.shape)}: got {tuple(tree.draft_probs.shape)}"
        )
    return verify_greedy(tree, _choose_drawn(tree, probs, generator))


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One sample from each distribution: (..., vocab) float, need not sum to one -> (...) int64."""
    flat = probs.reshape(-1, probs.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probs.shape[:-1])


def _choose_drawn(tree: TokenTree, probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """The token after each node by recursive rejection sampling, all nodes at once, one pass per sibling rank."""
    p, q = probs.clone(), tree.draft_probs.clone()  # type: ignore[union-attr]
    child = _children_by_rank(tree)  # (batch, nodes, ranks), -1 where a node has fewer children
    choice = torch.full_like(tree.tokens, -1)
    for rank in range(child.shape[-1]):
        node = child[..., rank]
        token = tree.tokens.gather(1, node.clamp(min=0))[..., None]
        p_token, q_token = p.gather(-1, token), q.gather(-1, token)
        chance = torch.rand(token.shape, generator=generator, device=p.device, dtype=p.dtype)
        pending = (node >= 0) & (choice < 0)
        accept = pending & (chance * q_token < p_token)[..., 0]
        choice = torch.where(accept, token[..., 0], choice)
        reject = (pending & ~accept)[..., None]
        residual = _normalise((p - q).clamp(min=0), otherwise=p)
        p = torch.where(reject, residual, p)
        q = torch.where(reject, _normalise(q.scatter(-1, token, 0.0), otherwise=q), q)
    return torch.where(choice < 0, draw(p, generator), choice)


def _normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Scale the last axis to sum to one; a row of zeros (p = q up to rounding) becomes the row of ``otherwise``."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), otherwise)


def _children_by_rank(tree: TokenTree) -> Tensor:
    """(batch, nodes, ranks) int64: the node index of each node's first, second, ... valid child, -1 padded."""
    index = torch.arange(tree.nodes, device=tree.tokens.device)
    is_child = tree.parents[:, None, :] == index[:, None]  # (batch, parent, node)
    if tree.valid is not None:
        is_child &= tree.valid[:, None, :]
    rank = is_child.cumsum(-1) - 1
    ranks = max(1, tree.nodes - 1)
    table = torch.full((*is_child.shape[:2], ranks + 1), -1, device=index.device)
    table = table.scatter(-1, torch.where(is_child, rank, ranks), index.expand_as(rank))[..., :ranks]
    used = int((table >= 0).any(0).any(0).sum())
    return table[..., : max(1, used)]
