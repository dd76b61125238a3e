"""Training plan, the order of examples, and the interface of what the ``Trainer`` trains."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
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
    """A ``Schedule`` with exactly one of ``steps`` and ``minutes``.

    Raises:
        UserError: both or neither of them are given, or a value is out of range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.minutes is None):
            raise UserError(f"give one of steps and minutes: received steps={self.steps}, minutes={self.minutes}")


class ExampleSampler(Protocol):
    """Sample the examples of each step; resumable."""

    @property
    def info(self) -> dict[str, Any]:
        """Logged with each step, such as the stage of a curriculum."""

    def next(self, progress: float) -> list[Any]:
        """The next step's examples, those of all processes, given the run's progress from 0 to 1."""

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to continue."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict()``."""


class TrainingTask(Protocol):
    """Network, data and loss of a training run."""

    @property
    def network(self) -> nn.Module:
        """In float32, on the device."""

    @property
    def optimisers(self) -> Optimisers:
        """Of the parameters to train."""

    @property
    def sampler(self) -> ExampleSampler:
        """Of the training examples."""

    def batch(self, examples: list[Any]) -> Any:
        """Examples as a batch of tensors."""

    def weight(self, batch: Any) -> int:
        """The number of positions that a batch's loss is a mean over."""

    def loss(self, network: nn.Module, batch: Any, generator: torch.Generator, progress: float) -> LossOutput:
        """The loss of a batch at a progress from 0 to 1."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of the current network on held-out examples."""

    def save(self, folder: Path) -> None:
        """Write the trained drafter."""


TEXT, MIXED = "text", "mixed"
ExampleIndex = tuple[str, int]
"""Kind of an example, ``TEXT`` (stage 1) or ``MIXED`` (stage 2), and its index among the examples of that kind."""

POOL = 8
"""Batches sampled together: a pool is sorted by length before it is split into batches, which saves padding."""


class CurriculumSampler:
    """Samples batches of examples; each kind is traversed whole, reshuffled at every epoch.

    Args:
        lengths: length of each example by kind, in any unit.
        seed: of the shuffling.
        mixed_share: maps the run's progress (0 to 1) to the probability that an example is ``MIXED``. Only used where
            there are examples of both kinds.

    Attributes:
        info: stage and share of the current pool's last request, for the training log.

    Raises:
        UserError: there are no examples.
    """

    def __init__(
        self,
        lengths: Mapping[str, Sequence[int]],
        batch: int,
        seed: int,
        mixed_share: Callable[[float], float] = lambda progress: progress,
    ) -> None:
        self.lengths = {kind: found for kind, found in lengths.items() if len(found)}
        if not self.lengths:
            raise UserError("training needs at least one conversation that is not held out: received none")
        self.batch, self.seed = batch, seed
        self.info: dict[str, Any] = {}
        self._mixed_share = mixed_share
        self._drawn = dict.fromkeys(self.lengths, 0)
        self._pools = 0
        self._waiting: list[list[ExampleIndex]] = []
        self._shuffled: dict[str, tuple[int, list[int]]] = {}

    def next(self, progress: float) -> list[ExampleIndex]:
        """The next batch of examples, given the run's progress from 0 to 1."""
        share = self._mixed_share(progress) if len(self.lengths) == 2 else float(MIXED in self.lengths)
        self.info = {"stage": 1 if share == 0.0 else 2, "share": round(share, 4)}
        if not self._waiting:
            self._fill(share)
        return self._waiting.pop()

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to continue the sequence of batches."""
        return {"drawn": dict(self._drawn), "pools": self._pools, "waiting": [list(batch) for batch in self._waiting]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the ``state_dict()`` of a sampler of the same examples, batch size and seed."""
        self._drawn, self._pools = dict(state["drawn"]), state["pools"]
        self._waiting = [[(kind, index) for kind, index in batch] for batch in state["waiting"]]

    def _fill(self, share: float) -> None:
        rng = random.Random(f"{self.seed} pool {self._pools}")
        self._pools += 1
        pool = [self._draw(MIXED if rng.random() < share else TEXT) for _ in range(POOL * self.batch)]
        pool.sort(key=lambda example: self.lengths[example[0]][example[1]])
        self._waiting = [pool[start : start + self.batch] for start in range(0, len(pool), self.batch)]
        rng.shuffle(self._waiting)

    def _draw(self, kind: str) -> ExampleIndex:
        count = len(self.lengths[kind])
        epoch, place = divmod(self._drawn[kind], count)
        self._drawn[kind] += 1
        if self._shuffled.get(kind, (-1, []))[0] != epoch:
            order = list(range(count))
            random.Random(f"{self.seed} {kind} {epoch}").shuffle(order)
            self._shuffled[kind] = epoch, order
        return kind, self._shuffled[kind][1][place]


def linear_ramp(start: float) -> Callable[[float], float]:
    """A function of progress that is 0 until ``start``, then rises linearly to 1."""
    return lambda progress: 0.0 if progress <= start else (progress - start) / (1.0 - start)
