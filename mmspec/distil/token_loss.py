"""Losses of drafted distributions against the target's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
