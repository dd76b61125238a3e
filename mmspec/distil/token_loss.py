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
    if not bool(wanted.any()):
        return LossOutput(batch.hidden.new_zeros((), dtype=torch.float32), {})
    head: Any = target.head if draft_ids is None else target.narrow_head(draft_ids)
    with torch.no_grad():
        goal = head(batch.hidden[:, :-1][wanted]).float().softmax(-1)
    scores = (output_layer or head)(states()[:, :-1][wanted])
    loss = token_loss(kind, goal, scores.float().log_softmax(-1))
    right = (scores.argmax(-1) == goal.argmax(-1)).float().mean()
    return LossOutput(loss, {"token_1": float(loss.detach()), "right_1": float(right)})
