"""Log probabilities of emitted tokens, as the model gives them: before logits processors and sampling parameters.

This is vLLM's ``logprobs_mode="raw_logprobs"``, its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmspec.checks import optional, whole

MOST_LOGPROBS = 20
"""Largest number of alternatives per token, as in OpenAI's API."""

LOGPROBS = optional(whole(0, MOST_LOGPROBS))


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probability of one emitted token.

    Attributes:
        top: the most probable tokens at its position with their log probabilities, best first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


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
