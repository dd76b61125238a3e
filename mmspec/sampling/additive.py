"""Additive terms of a token's logit: bias, presence and frequency penalty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmspec.errors import UserError
from mmspec.ops.transfer import on_device


class AdditiveTerms(LogitsProcessor):
    """Adds ``bias[t] - frequency * n[t] - presence * (n[t] > 0)`` to the logit of token t; n counts it in the output.

    The formula of OpenAI's API (its reference, "Frequency and presence penalties"), with counts of the output alone as
    in vLLM.

    Args:
        bias: pairs of token id and bias.
        prompt_length: tokens before the output.
    """

    def __init__(
        self, bias: Sequence[tuple[int, float]], presence: float, frequency: float, prompt_length: int
    ) -> None:
        self.bias, self.presence, self.frequency = tuple(bias), presence, frequency
        # Where nothing is counted, prompts of all lengths are processed together.
        self.prompt_length = prompt_length if self.counts else 0

    @property
    def counts(self) -> bool:
        """Whether the terms depend on the output."""
        return bool(self.presence or self.frequency)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores, (batch, vocab), after histories, (batch, length) int64, as transformers' processors."""
        scores = scores + self.vector(scores) if self.bias else scores
        return self.penalised(input_ids[:, self.prompt_length :], scores) if self.counts else scores

    def vector(self, scores: Tensor) -> Tensor:
        """The biases of all tokens, (vocab,).

        Raises:
            UserError: a token is outside the vocabulary.
        """
        vocab, greatest = scores.shape[-1], max(token for token, _ in self.bias)
        if greatest >= vocab:
            raise UserError(f"biased tokens must be below the vocabulary's size {vocab}: got {greatest}")
        tokens, biases = zip(*self.bias, strict=True)
        found = torch.zeros(vocab, device=scores.device)
        found[on_device(list(tokens), scores.device)] = on_device(list(biases), scores.device)
        return found

    def penalised(self, output: Tensor, scores: Tensor) -> Tensor:
        """Subtract the penalties.

        Args:
            output: (..., length) int64; numbers that are no tokens of the vocabulary are padding.
            scores: (..., vocab).
        """
        vocab = scores.shape[-1]
        tokens = output.where((output >= 0) & (output < vocab), vocab)
        counts = scores.new_zeros(*scores.shape[:-1], vocab + 1)
        counts = counts.scatter_add_(-1, tokens, torch.ones_like(tokens, dtype=scores.dtype))[..., :vocab]
        return scores - self.frequency * counts - self.presence * (counts > 0)
