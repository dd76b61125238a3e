"""Training losses: output of a task, running means for the log."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """Loss of a batch.

    Attributes:
        total: scalar to minimise, a mean over the batch's loss positions.
        metrics: logged values by name: parts of the loss, accuracies.
    """

    total: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


class RunningMeans:
    """Means of loss and metrics over the steps since the last ``pop``."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, dict[str, float]]] = []

    def add(self, loss: Tensor, metrics: dict[str, float]) -> None:
        """Add a step. The scalar ``loss`` stays on its device until ``pop``."""
        self._rows.append((loss.detach(), metrics))

    def pop(self) -> dict[str, float]:
        """The means, that of the loss as "loss", and resets them."""
        means = {"loss": torch.stack([loss for loss, _ in self._rows]).mean().item()}
        for name in dict.fromkeys(name for _, metrics in self._rows for name in metrics):
            values = [metrics[name] for _, metrics in self._rows if name in metrics]
            means[name] = sum(values) / len(values)
        self._rows = []
        return means
