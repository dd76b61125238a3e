"""Training plan, and the interface of what the `Trainer` trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmspec.checks import NOT_NEGATIVE, POSITIVE, SHARE, Checked, option, settable, whole
from mmspec.errors import UserError

if TYPE_CHECKING:  # commands derive their options from the plan, and need no torch for it
    import torch
    from torch import nn

    from mmspec.training.loss import LossOutput
    from mmspec.training.optimisers import Optimisers


@dataclass(frozen=True)
class Schedule(Checked):
    """Length, learning-rate schedule and intervals of a training run.

    Attributes:
        steps: such a run is exactly repeatable.
        minutes: earlier parts of a resumed run included.
        hold: afterwards the learning rate decays linearly to zero.
        seed: of the random generator that each step's loss is given, too.
        checkpoint_minutes: a killed run loses at most this.
    """

    steps: int | None = option(None, settable(whole(1)), "Length of the run in optimiser steps.")
    minutes: float | None = option(None, settable(POSITIVE), "Or in minutes of wall clock.")
    warmup: int = option(50, whole(1), "Steps of linear warm-up.")
    hold: float = option(0.4, SHARE, "Share of the run before decay.")
    seed: int = option(0, whole(0, 2**22), "Of the order of examples, initial weights and noise.")
    checkpoint_minutes: float = option(5.0, NOT_NEGATIVE, "Between checkpoints.")
    report_minutes: float = option(5.0, NOT_NEGATIVE, "Between evaluations on held-out examples.")


@dataclass(frozen=True)
class TrainingPlan(Schedule):
    """A `Schedule` with exactly one of `steps` and `minutes`.

    Raises:
        UserError: both or neither of them are given, or a value is out of range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
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
