"""Muon for the matrices inside layers, AdamW for everything else; one learning-rate factor over both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Rates:
    """How fast parameters move. The defaults suit the tower on its own.

    Attributes:
        matrix: Muon's rate, scaled to the step size of AdamW (`match_rms_adamw`); None leaves matrices to AdamW too.
        other: AdamW's rate.
        decay: weight decay of both.
        clip: norm that the gradients together are cut to.
    """

    matrix: float | None = 4e-3
    other: float = 2e-3
    decay: float = 0.01
    clip: float = 1.0


def is_inside(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a layer or projector, and not an embedding or a head."""
    return parameter.ndim == 2 and (".layers." in f".{name}" or "projector" in name)


class Optimisers:
    """Steps several optimisers at `rate` times their own learning rates."""

    def __init__(
        self,
        groups: Iterable[tuple[nn.Module, float]],
        rates: Rates | None = None,
        is_matrix: Callable[[str, nn.Parameter], bool] = is_inside,
    ) -> None:
        """`groups` are modules with a factor on their rates; a parameter shared by two belongs to the first.

        `is_matrix` says of a parameter, with its name in its module, whether Muon moves it.
        """
        rates = self.rates = rates or Rates()
        matrices: list[dict] = []
        others: list[dict] = []
        taken: set[int] = set()
        self.parameters: list[nn.Parameter] = []
        for module, factor in groups:
            inner: list[nn.Parameter] = []
            outer: list[nn.Parameter] = []
            for name, parameter in module.named_parameters():
                if id(parameter) in taken:
                    continue
                taken.add(id(parameter))
                (inner if rates.matrix is not None and is_matrix(name, parameter) else outer).append(parameter)
            self.parameters += inner + outer
            if inner:
                matrices.append({"params": inner, "lr": (rates.matrix or 0.0) * factor})
            if outer:
                others.append({"params": outer, "lr": rates.other * factor})
        self.all: list[torch.optim.Optimizer] = []
        if matrices:
            self.all.append(torch.optim.Muon(matrices, weight_decay=rates.decay, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.all.append(torch.optim.AdamW(others, weight_decay=rates.decay, betas=(0.9, 0.95), fused=True))
        self._base = [[group["lr"] for group in optimiser.param_groups] for optimiser in self.all]

    def step(self, rate: float) -> None:
        """Clips the gradients, moves every parameter and clears the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, self.rates.clip)
        for optimiser, base in zip(self.all, self._base, strict=True):
            for group, own in zip(optimiser.param_groups, base, strict=True):
                group["lr"] = own * rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        """State of every optimiser."""
        return [optimiser.state_dict() for optimiser in self.all]

    def load_state_dict(self, states: list[dict]) -> None:
        """Restores `state_dict()` of the same groups."""
        for optimiser, state in zip(self.all, states, strict=True):
            optimiser.load_state_dict(state)


def rate(progress: float, step: int, warmup: int, hold: float) -> float:
    """Learning-rate factor: up over `warmup` steps, full until `hold` of the stage, then straight down to zero."""
    falling = 1.0 if progress <= hold else max(0.0, (1.0 - progress) / (1.0 - hold))
    return min(1.0, (step + 1) / warmup) * falling
