"""Network of Kangaroo (arXiv 2404.18911, section 3.1): an attention layer without MLP and a norm, between the output of
one of the target's first layers and the target's output layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmspec.drafters.hidden_state.layer import Attend, LlamaLayer, Norm, Rotation
from mmspec.drafters.kangaroo.config import KangarooConfig


class KangarooNetwork(nn.Module):
    """See the module."""

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__()
        self.config = config
        self.layers: Any = nn.ModuleList([LlamaLayer(config)])
        self.norm = Norm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """States of the target's output layer, (batch, nodes, hidden), from the target's early states.

        Args:
            x: (batch, nodes, hidden).
            rotation, attend: see ``DecoderLayer.attention``.
        """
        return self.norm(self.layers[0](x, rotation, attend))
