"""Log probabilities of emitted tokens, and logits and scores per step.

Log probabilities are computed before logits processors and sampling parameters, as with vLLM's default
``logprobs_mode="raw_logprobs"``. Logits and scores are defined as in transformers' ``generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probability of one emitted token.

    Attributes:
        top: the most probable tokens at this position with their log probabilities, best first.
        text_offset: characters of the answer before this token, stop strings included; 0 in the reasoning.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    text_offset: int = 0


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log probabilities of emitted tokens.

    Args:
        logits: (tokens, vocab), raw logits at the nodes before the tokens.
        top: number of most probable tokens to list at each position.
    """
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    own = [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]
    return [
        TokenLogprob(token, logprob, list(zip(ids[place], values[place], strict=True)))
        for place, (token, logprob) in enumerate(zip(tokens, own, strict=True))
    ]


def logits_by_step(rows: Sequence[Sequence[Tensor]], steps: int) -> tuple[Tensor, ...]:
    """Raw logits of each step, (batch, vocab) float32 each; zeros at rows that have ended.

    Args:
        rows: logits by row and step, (vocab,) each.
    """
    found = [rows[0][0].new_zeros(len(rows), len(rows[0][0])) for _ in range(steps)]
    for number, row in enumerate(rows):
        for step, logits in zip(found, row, strict=False):
            step[number] = logits
    return tuple(found)


def scores_of(rows: Sequence[Tensor | None], ids: Tensor, processors: Sequence[Any]) -> Tensor:
    """Scores of a step, (batch, vocab): logits after all processors, called as in ``generate``.

    Args:
        rows: logits of each row, (vocab,); None at rows that have ended, whose logits are zeros.
        ids: (batch, length) int64, the tokens before the step.
    """
    empty = torch.zeros_like(next(row for row in rows if row is not None))
    scores = torch.stack([empty if row is None else row for row in rows])
    for processor in processors:
        scores = processor(ids, scores)
    return scores
