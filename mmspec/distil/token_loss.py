"""Losses of drafted distributions against the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from mmspec.core.target import Target
from mmspec.distil.features import Features
from mmspec.training.loss import LossOutput

TokenLoss = Literal["kl", "lk", "tv"]

_ETA = 3.0  # decay of the share of cross-entropy in the LK loss; the best value of arXiv 2602.23881
_ENTROPY, _DISTANCE = 0.1, 0.9  # shares of the two terms of the TV loss, in the recipes of deepseek-ai/DeepSpec


def token_loss(kind: TokenLoss, goal: Tensor, scores: Tensor) -> Tensor:
    """Returns the mean loss of drafts.

    Args:
        kind: "kl", the cross-entropy with the target's distribution; "lk", ``w * kl + (1 - w) * (1 - a)`` with the
            expected acceptance a = sum(min(p, q)) of a draft, w = exp(-3 a): the hybrid LK loss (arXiv 2602.23881);
            "tv", ``0.1 * kl + 0.9 * sum(|p - q|)``: DSpark's (arXiv 2607.05147, formulas 9 and 10), whose
            cross-entropy is with the target's tokens.
        goal: the target's probabilities, (drafts, tokens).
        scores: log probabilities of the drafts, (drafts, tokens).
    """
    loss = -(goal * scores).sum(-1)
    if kind == "lk":
        accepted = torch.minimum(goal, scores.exp()).sum(-1)
        share = (-_ETA * accepted.detach()).exp()
        loss = share * loss + (1.0 - share) * (1.0 - accepted)
    elif kind == "tv":
        loss = _ENTROPY * loss + _DISTANCE * (goal - scores.exp()).abs().sum(-1)
    return loss.mean()


class TokenLosses:
    """Sum of the losses of drafts against the target's next-token distributions, and its metrics.

    Args:
        kind: see ``token_loss``.
        hidden: (batch, length, hidden), the target's states, of which its output layer makes the distributions.
        wanted: (batch, length) bool, where they are wanted.
        draft_ids: (n,) int64, to which distributions are restricted; None are all tokens.

    Attributes:
        head: the target's output layer for these tokens.
        count: number of the drafts that losses are normalised by, so that those of several processes add up: all that
            are wanted.
        output: the losses so far, and the metrics ``token_k`` and ``right_k``, loss and accuracy of the drafts k tokens
            ahead.
    """

    def __init__(
        self, kind: TokenLoss, target: Target, hidden: Tensor, wanted: Tensor, draft_ids: Tensor | None = None
    ) -> None:
        self._kind = kind
        self.head: Any = target.head if draft_ids is None else target.narrow_head(draft_ids)
        self.count = int(wanted.sum())
        self.output = LossOutput(hidden.new_zeros((), dtype=torch.float32), {})
        self._index = wanted.flatten().cumsum(0).view(wanted.shape) - 1  # of a position in the goals
        if self.count:
            with torch.no_grad():
                self._goals = self.head(hidden[wanted]).float().softmax(-1)

    def goals(self, valid: Tensor, position: Tensor | None = None) -> Tensor:
        """The target's distributions, (drafts, tokens), at positions, (batch, n) int64 or all, where ``valid``."""
        index = self._index if position is None else self._index.gather(1, position)
        return self._goals[index[valid]]

    def add(self, ahead: int, scores: Tensor, goal: Tensor, weight: float = 1.0, **further: Tensor) -> None:
        """Add the losses of drafts.

        Args:
            ahead: suffix of the metrics' names.
            scores, goal: (drafts, tokens), logits, and the target's distributions.
            further: other losses of theirs by name, which are added to that of the tokens.
        """
        loss = token_loss(self._kind, goal, scores.float().log_softmax(-1))
        right = (scores.argmax(-1) == goal.argmax(-1)).float().mean()
        total = self.output.total + weight * len(goal) / self.count * sum(further.values(), loss)
        values = {"token": loss, "right": right, **further}
        metrics = {f"{name}_{ahead}": float(value.detach()) for name, value in values.items()}
        self.output = LossOutput(total, self.output.metrics | metrics)


def next_token_loss(
    kind: TokenLoss,
    target: Target,
    batch: Features,
    states: Callable[[], Tensor],
    draft_ids: Tensor | None = None,
    output_layer: Any = None,
) -> LossOutput:
    """Returns the loss against the target's next-token distributions at the same positions, over answer tokens that
    another answer token follows, and the metrics ``token_1`` and ``right_1``, loss and accuracy.

    Args:
        kind: see ``token_loss``.
        states: returns the drafter's last hidden states, (batch, length, hidden); not called without such tokens.
        draft_ids: (n,) int64, to which distributions are restricted.
        output_layer: of the drafter; by default the target's.
    """
    wanted = batch.answer[:, :-1] & batch.answer[:, 1:]
    losses = TokenLosses(kind, target, batch.hidden[:, :-1], wanted, draft_ids)
    if losses.count:
        scores = (output_layer or losses.head)(states()[:, :-1][wanted])
        losses.add(1, scores, losses.goals(wanted))
    return losses.output
