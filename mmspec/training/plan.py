"""Training plan, and the interface of what the `Trainer` trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from mmspec.errors import UserError
from mmspec.training.loss import LossOutput
from mmspec.training.optimisers import Optimisers


@dataclass(frozen=True)
class TrainingPlan:
    """Length, learning-rate schedule and intervals of a training run. Exactly one of `steps` and `minutes` is given.

    Attributes:
        steps: optimiser steps. Such a run is exactly repeatable.
        minutes: wall clock, earlier parts of a resumed run included.
        warmup: steps of linear learning-rate warm-up.
        hold: share of the run after which the learning rate decays linearly to zero.
        seed: of the random generator that each step's loss is given.
        checkpoint_minutes: interval between checkpoints; a killed run loses at most this.
        report_minutes: interval between evaluations on held-out examples.

    Raises:
        UserError: both or neither of `steps` and `minutes` are given.
    """

    steps: int | None = None
    minutes: float | None = None
    warmup: int = 50
    hold: float = 0.4
    seed: int = 0
    checkpoint_minutes: float = 5.0
    report_minutes: float = 5.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise UserError(f"give one of steps and minutes: received steps={self.steps}, minutes={self.minutes}")


class Sampler(Protocol):
    """Samples the examples of each step; resumable."""

    @property
    def info(self) -> dict[str, Any]:
        """Logged with each step, such as the stage of a curriculum."""

    def next(self, progress: float) -> list[Any]:
        """Returns the next step's examples, those of all processes, given the run's progress from 0 to 1."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs to continue."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict()`."""


class TrainingTask(Protocol):
    """Network, data and loss of a training run."""

    @property
    def network(self) -> nn.Module:
        """In float32, on the device."""

    @property
    def optimisers(self) -> Optimisers:
        """Of the parameters to train."""

    @property
    def sampler(self) -> Sampler:
        """Of the training examples."""

    def batch(self, examples: list[Any]) -> Any:
        """Returns examples as a batch of tensors."""

    def weight(self, batch: Any) -> int:
        """Returns the number of positions that a batch's loss is a mean over."""

    def loss(self, network: nn.Module, batch: Any, generator: torch.Generator, progress: float) -> LossOutput:
        """Returns the loss of a batch at a progress from 0 to 1."""

    def evaluate(self) -> dict[str, float]:
        """Returns metrics of the current network on held-out examples."""

    def save(self, folder: Path) -> None:
        """Writes the trained model or drafter."""
