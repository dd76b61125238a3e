"""How long a drafter is trained, and what the trainer needs to be told of what it trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mmspec.training.optimisers import Optimisers, Rates
from mmspec.training.order import MIXED, TEXT, Example


@dataclass(frozen=True)
class Plan:
    """How long to train, and how. Exactly one of `steps`, `minutes` and `epochs` is given.

    Attributes:
        steps: steps of the run; makes it exactly repeatable, as `epochs` does.
        minutes: wall clock of the run, earlier parts of a resumed run included.
        epochs: how often to go through all examples.
        batch: examples per step, those of all processes together.
        text_share: share of the run with text alone (stage 1), where there is text.
        optimiser: "muon" moves matrices by Muon and the rest by AdamW; "adamw" is the setting of arXiv 2505.14260.
        rate: learning rate of the matrices; that of the rest is half of it under Muon.
        warmup: steps in which the rate rises.
        hold: share of the run after which the rate falls linearly to zero.
        checkpoint_minutes: between checkpoints; a killed run loses no more than this.
        report_minutes: between reports on held-out examples.
    """

    steps: int | None = None
    minutes: float | None = None
    epochs: float | None = None
    batch: int = 16
    text_share: float = 0.3
    optimiser: Literal["muon", "adamw"] = "muon"
    rate: float = 3e-3
    warmup: int = 50
    hold: float = 0.4
    seed: int = 0
    checkpoint_minutes: float = 5.0
    report_minutes: float = 5.0

    def share(self, progress: float, lengths: Mapping[str, Sequence[int]]) -> float:
        """Probability that an example is multimodal (arXiv 2505.14260, section 3.3)."""
        if not lengths.get(TEXT):
            return 1.0
        if not lengths.get(MIXED) or progress < self.text_share:
            return 0.0
        return (progress - self.text_share) / (1.0 - self.text_share)

    def length(self, lengths: Mapping[str, Sequence[int]]) -> int | None:
        """Steps of the run on these examples; None where minutes end it."""
        if self.epochs is None:
            return self.steps
        return math.ceil(self.epochs * sum(map(len, lengths.values())) / self.batch)

    def optimisers(self, network: nn.Module) -> Optimisers:
        """For every parameter of a drafter's network."""
        muon = Rates(matrix=self.rate, other=self.rate / 2)
        rates = muon if self.optimiser == "muon" else Rates(matrix=None, other=self.rate, clip=0.5)
        # Rows of an embedding are moved one by one, by what they were looked up for.
        matrices = lambda name, parameter: parameter.ndim == 2 and "embed" not in name  # noqa: E731
        return Optimisers([(network, 1.0)], rates, is_matrix=matrices)


class Losses(Protocol):
    """What a forward pass of a step gives: the loss, a mean over positions, and figures to log."""

    @property
    def total(self) -> Tensor:
        """A scalar."""

    @property
    def figures(self) -> dict[str, float]:
        """For people."""


class Task(Protocol):
    """What is trained, on what.

    Attributes:
        network: the drafter's, in float32 on the device.
        lengths: of the training examples of each kind, `TEXT` and `MIXED`.
    """

    network: nn.Module
    lengths: dict[str, list[int]]

    def batch(self, examples: list[Example]) -> Any:
        """The tensors of these examples."""

    def weight(self, batch: Any) -> int:
        """How many positions the loss of a batch is a mean over."""

    def loss(self, network: nn.Module, batch: Any, generator: torch.Generator, progress: float) -> Losses:
        """Losses of a batch, when this share of the training is behind us."""

    def held_out(self) -> dict[str, float]:
        """Figures of the network as it stands, on examples that it is not trained on."""

    def save(self, folder: Path) -> None:
        """Write the drafter's checkpoint."""
