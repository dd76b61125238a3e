"""Muon for the weight matrices of layers, AdamW for all other parameters, and the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn


@dataclass(frozen=True)
class LearningRates:
    """Learning rates, weight decay and gradient clipping.

    Attributes:
        matrix: of Muon, scaled to match AdamW's update RMS (``match_rms_adamw``); None trains matrices by AdamW too.
        other: of AdamW.
        decay: weight decay of both.
        clip: maximum norm of all gradients together.
    """

    matrix: float | None
    other: float
    decay: float = 0.01
    clip: float = 1.0

    @property
    def highest(self) -> float:
        """The rate that training logs show."""
        return self.other if self.matrix is None else self.matrix


class Optimisers:
    """Muon and AdamW as one optimiser of a network's parameters that require gradients."""

    def __init__(self, network: nn.Module, rates: LearningRates) -> None:
        self.rates = rates
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                # An embedding's rows are updated one by one: not a matrix in Muon's sense.
                is_matrix = rates.matrix is not None and parameter.ndim == 2 and "embed" not in name
                (matrices if is_matrix else others).append(parameter)
        self.parameters = matrices + others
        self.all: list[torch.optim.Optimizer] = []
        if matrices:
            muon = partial(torch.optim.Muon, weight_decay=rates.decay, adjust_lr_fn="match_rms_adamw")
            self.all.append(muon(matrices, lr=rates.matrix or 0.0))
        if others:
            adamw = partial(torch.optim.AdamW, weight_decay=rates.decay, betas=(0.9, 0.95), fused=True)
            self.all.append(adamw(others, lr=rates.other))
        self._base = [[group["lr"] for group in optimiser.param_groups] for optimiser in self.all]

    def step(self, factor: float) -> None:
        """Clip the gradients, take a step at ``factor`` times the learning rates, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, self.rates.clip)
        for optimiser, base in zip(self.all, self._base, strict=True):
            for group, own in zip(optimiser.param_groups, base, strict=True):
                group["lr"] = own * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [optimiser.state_dict() for optimiser in self.all]

    def load_state_dict(self, states: list[dict]) -> None:
        """Restore the ``state_dict()`` of the same groups."""
        for optimiser, state in zip(self.all, states, strict=True):
            optimiser.load_state_dict(state)


def lr_factor(progress: float, step: int, warmup: int, hold: float) -> float:
    """Learning-rate factor: linear warm-up over ``warmup`` steps, 1 until progress ``hold``, then linear decay to 0."""
    decay = 1.0 if progress <= hold else max(0.0, (1.0 - progress) / (1.0 - hold))
    return min(1.0, (step + 1) / warmup) * decay
