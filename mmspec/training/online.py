"""Training of drafters from sequences that were recorded while they were decoded, without passes of the target."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from mmspec.adaptation.adaptation import RecordedAnswer
from mmspec.core.target import Target
from mmspec.drafters.trained import TrainedDrafter
from mmspec.training.features import ConversationFeatures, collate
from mmspec.training.medusa import MedusaObjective
from mmspec.training.tasks import Objective, drafter_optimisers

_RATE = 1e-3
_BATCH = 4  # answers of a step


class OnlineLearner:
    """Trains a float32 copy of a drafter's network; see ``mmspec.adaptation.adaptation.Learner``.

    Args:
        objective: loss of a batch of features.
        drafter: not attached yet.
        target: for its frozen embedding and output layer.
    """

    def __init__(self, objective: Objective, drafter: TrainedDrafter, target: Target) -> None:
        self._objective, self._target = objective, target
        self._draft_ids = None if drafter.draft_ids is None else drafter.draft_ids.to(target.device)
        self._layers = [name for name in drafter.features if name != "last"]
        self._generator = torch.Generator(target.device).manual_seed(0)
        self.restart(drafter.network)

    def restart(self, network: nn.Module) -> None:
        """Continue from these weights, with new optimisers."""
        self._network = copy.deepcopy(network).to(self._target.device, torch.float32).requires_grad_().train()
        self._optimisers = drafter_optimisers(self._network, "muon", _RATE)
        self._added = 0  # answers of this batch

    def weights(self) -> nn.Module:
        return copy.deepcopy(self._network).requires_grad_(False).eval()

    def learn(self, answer: RecordedAnswer) -> None:
        """Add an answer to a batch; the last one of a batch takes a step."""
        target: Any = self._target
        batch, parameters = collate([self._row(answer)], target), self._optimisers.parameters
        half = batch.hidden.dtype != torch.float32
        with torch.enable_grad(), torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=half):
            loss = self._objective(self._network, target, batch, self._draft_ids, self._generator, 1.0).total
            if not loss.requires_grad:  # answers of a token or two
                return
            # Of these alone: the target's weights may require gradients.
            gradients = torch.autograd.grad(loss / _BATCH, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._added += 1
        if self._added == _BATCH:
            self._optimisers.step(1.0)
            self._added = 0

    def _row(self, answer: RecordedAnswer) -> ConversationFeatures:
        device = self._target.device
        generated = torch.arange(len(answer.tokens)) >= answer.prompt
        # Clones made outside of inference mode can be used in autograd.
        features = {name: x.clone() for name, x in answer.features.items()}
        layers = torch.cat([features[name] for name in self._layers], dim=-1) if self._layers else None
        visual = answer.visual.to(device)
        return ConversationFeatures(
            answer.tokens.to(device), features["last"], answer.shown.clone(), visual, generated.to(device), layers
        )


medusa = partial(OnlineLearner, MedusaObjective(loss="lk"))
