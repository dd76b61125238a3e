"""Native MTP drafter: the multi-token prediction layer that Qwen3.5 checkpoints carry, recursive over a tree's levels.

It takes the target's last hidden states and input embeddings, those of images and videos included, at the target's
positions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.drafters import checkpoint
from mmspec.drafters.hidden_state.positioned import PositionedDrafter
from mmspec.drafters.mtp.network import MTPNetwork
from mmspec.drafters.mtp.published import read_mtp
from mmspec.drafters.shape import RopeShape


class MTP(PositionedDrafter):
    """Native MTP drafter.

    Args:
        network: the trained network, moved to the target's device and dtype.
        top_k, depth, total_tokens, verifier: see ``TrainedDrafter``.
    """

    name: ClassVar[str] = "mtp"

    def __init__(
        self,
        network: MTPNetwork,
        *,
        top_k: int = 10,
        depth: int = 6,
        total_tokens: int = 59,
        verifier: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(network, 1, None, top_k=top_k, depth=depth, total_tokens=total_tokens, verifier=verifier)

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Load the layer of a target's checkpoint, or a checkpoint of ``save``; raises ``UserError`` if invalid."""
        if checkpoint.drafter_name(folder) is None:
            config, tensors, verifier = read_mtp(folder)
            drafter = cls(checkpoint.load_network(MTPNetwork, config, tensors, folder))
            drafter.published = verifier
            return drafter
        config, tensors, keywords = checkpoint.read_network(folder, RopeShape)
        return cls(checkpoint.load_network(MTPNetwork, config, tensors, folder), **keywords)

    def scoring(self, target: Target, probe: Tensor) -> Callable[[Tensor], Tensor]:
        self.fuse = self.inputs
        return target.head

    def states(self, output: TargetOutput) -> Tensor:
        return output.features["last"]

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        return self.network.combine(self.target.embed(tokens), states)

    def prompt_inputs(self, prompt: Prompt, output: TargetOutput, first: Tensor) -> Tensor:
        target = self.target
        fed = target.embed(prompt.input_ids) if output.embeds is None else output.embeds  # None for text
        return self.network.combine(torch.cat([fed[:, 1:], target.embed(first)], dim=1), self.states(output))
