"""Initial weights of hidden-state drafters: those of the target's head, or of another drafter."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mmspec.core.target import Target
from mmspec.drafters.hidden_state.drafter import HiddenStateDrafter
from mmspec.errors import UserError


@torch.no_grad()
def head_weight(target: Target, draft_ids: Tensor | None) -> Tensor:
    """Weight of the target's output layer for a draft vocabulary, (draft tokens, hidden) float32."""
    head = target.head if draft_ids is None else target.narrow_head(draft_ids)
    width = target.embed(torch.zeros(1, dtype=torch.long, device=target.device)).shape[-1]
    unit = torch.eye(width, device=target.device, dtype=target.dtype)
    return (head(unit) - head(torch.zeros_like(unit[:1]))).t().float()


def output_rows(target: Target) -> int:
    """Tokens that the target's output layer has."""
    return target.head(target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).shape[-1]


def load_shared_weights(start: HiddenStateDrafter, network: nn.Module, folder: Path | None) -> None:
    """Loads the weights of another drafter that the network has too; all others keep their random initialisation."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    shared = {name: tensor for name, tensor in start.network.state_dict().items() if name in wanted}
    for name, tensor in shared.items():
        if tuple(tensor.shape) != wanted[name]:
            raise UserError(f"{folder}: expected {name} {wanted[name]} to start from, received {tuple(tensor.shape)}")
    network.load_state_dict(shared, strict=False)
