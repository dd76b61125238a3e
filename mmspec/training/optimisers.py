"""Muon for the weight matrices of layers, AdamW for all other parameters, and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class LearningRates:
    """Learning rates, weight decay and gradient clipping. The defaults are those of the embedded vision tower.

    Attributes:
        matrix: of Muon, scaled to match AdamW's update RMS (`match_rms_adamw`); None trains matrices by AdamW too.
        other: of AdamW.
        decay: weight decay of both.
        clip: maximum norm of all gradients together.
    """

    matrix: float | None = 4e-3
    other: float = 2e-3
    decay: float = 0.01
    clip: float = 1.0

    @property
    def highest(self) -> float:
        """The rate that training logs show."""
        return self.other if self.matrix is None else self.matrix


def is_layer_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Returns whether a parameter is a matrix of a layer or projector, not an embedding or a head."""
    return parameter.ndim == 2 and (".layers." in f".{name}" or "projector" in name)


class Optimisers:
    """Muon and AdamW as one optimiser.

    Args:
        groups: modules, each with a factor on its learning rates. A parameter in two modules belongs to the first;
            those that require no gradient are left out.
        rates: learning rates; `LearningRates()` by default.
        is_matrix: whether Muon trains a parameter, given its name in its module.
    """

    def __init__(
        self,
        groups: Iterable[tuple[nn.Module, float]],
        rates: LearningRates | None = None,
        is_matrix: Callable[[str, nn.Parameter], bool] = is_layer_matrix,
    ) -> None:
        rates = self.rates = rates or LearningRates()
        matrices: list[dict] = []
        others: list[dict] = []
        taken: set[int] = set()
        self.parameters: list[nn.Parameter] = []
        for module, factor in groups:
            inner: list[nn.Parameter] = []
            outer: list[nn.Parameter] = []
            for name, parameter in module.named_parameters():
                if id(parameter) in taken or not parameter.requires_grad:
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

    def step(self, factor: float) -> None:
        """Clips the gradients, takes a step at `factor` times the learning rates, and clears the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, self.rates.clip)
        for optimiser, base in zip(self.all, self._base, strict=True):
            for group, own in zip(optimiser.param_groups, base, strict=True):
                group["lr"] = own * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [optimiser.state_dict() for optimiser in self.all]

    def load_state_dict(self, states: list[dict]) -> None:
        """Restores the `state_dict()` of the same groups."""
        for optimiser, state in zip(self.all, states, strict=True):
            optimiser.load_state_dict(state)


def lr_factor(progress: float, step: int, warmup: int, hold: float) -> float:
    """Learning-rate factor: linear warm-up over `warmup` steps, 1 until progress `hold`, then linear decay to 0."""
    decay = 1.0 if progress <= hold else max(0.0, (1.0 - progress) / (1.0 - hold))
    return min(1.0, (step + 1) / warmup) * decay
