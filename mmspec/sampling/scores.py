"""Logits and scores per step, as transformers' ``generate`` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def logits_by_step(rows: Sequence[Sequence[Tensor]], steps: int) -> tuple[Tensor, ...]:
    """Raw logits of each step, (batch, vocab) float32 each; zeros at rows that have ended.

    Args:
        rows: (vocab,) each, by row and step.
    """
    found = [rows[0][0].new_zeros(len(rows), len(rows[0][0])) for _ in range(steps)]
    for number, row in enumerate(rows):
        for step, logits in zip(found, row, strict=False):
            step[number] = logits
    return tuple(found)


def scores_by_step(logits: Sequence[Tensor], sequences: Tensor, processors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Logits after all processors, which are called as by ``generate``: with the tokens before each step.

    Args:
        logits: (batch, vocab) each.
        sequences: (batch, length) int64, which ends with the tokens of the steps.
    """
    first, found = sequences.shape[1] - len(logits), []
    for step, scores in enumerate(logits):
        scores = scores.clone()
        for processor in processors:
            scores = processor(sequences[:, : first + step], scores)
        found.append(scores)
    return tuple(found)
