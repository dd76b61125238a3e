"""Training losses: output of a task, next-token cross-entropy and its batches, running means for the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
"""Label of positions without a loss, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class LossOutput:
    """Loss of a batch.

    Attributes:
        total: scalar to minimise, a mean over the batch's loss positions.
        metrics: logged values by name: parts of the loss, accuracies.
    """

    total: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def next_token_loss(hidden: Tensor, head: Callable[[Tensor], Tensor], labels: Tensor) -> tuple[Tensor, float]:
    """Returns cross-entropy and accuracy of the next token; logits are computed at labelled positions only.

    Args:
        hidden: last hidden states, (batch, length, hidden).
        head: language model head, from (labels, hidden) to logits (labels, vocab).
        labels: (batch, length), as of `TokenBatch`.
    """
    labelled = labels != IGNORE
    truth = labels[labelled]
    logits = head(hidden[labelled]).float()
    accuracy = (logits.detach().argmax(-1) == truth).float().mean().item()
    return F.cross_entropy(logits, truth), accuracy


@dataclass
class TokenBatch:
    """Token sequences, padded on the right; causal layers need no mask for that.

    Attributes:
        tokens: (batch, length) int64.
        labels: (batch, length) int64, the next token, or `IGNORE` where there is no loss.
    """

    tokens: Tensor
    labels: Tensor

    @property
    def label_count(self) -> int:
        return int((self.labels != IGNORE).sum())


def pad_tokens(rows: Sequence[tuple[Any, Any]], pad: int, multiple: int) -> TokenBatch:
    """Pads rows of token ids and, for each, whether it is to be predicted, to a multiple of a length."""
    longest = max(len(ids) for ids, _ in rows) - 1
    length = -(-longest // multiple) * multiple
    tokens, labels = torch.full((len(rows), length), pad), torch.full((len(rows), length), IGNORE)
    for index, row in enumerate(rows):
        ids, predicted = (torch.as_tensor(column) for column in row)
        tokens[index, : len(ids) - 1] = ids[:-1]
        labels[index, : len(ids) - 1] = torch.where(predicted[1:], ids[1:].long(), IGNORE)
    return TokenBatch(tokens, labels)


class RunningMeans:
    """Means of loss and metrics over the steps since the last `pop`."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, dict[str, float]]] = []

    def add(self, loss: Tensor, metrics: dict[str, float]) -> None:
        """Adds a step. The scalar `loss` stays on its device until `pop`."""
        self._rows.append((loss.detach(), metrics))

    def pop(self) -> dict[str, float]:
        """Returns the means, that of the loss as "loss", and resets them."""
        means = {"loss": torch.stack([loss for loss, _ in self._rows]).mean().item()}
        for name in dict.fromkeys(name for _, metrics in self._rows for name in metrics):
            values = [metrics[name] for _, metrics in self._rows if name in metrics]
            means[name] = sum(values) / len(values)
        self._rows = []
        return means
