"""Network of native multi-token prediction in Qwen3.5: a projection of the next token's embedding and the last hidden
state, each normed, and one of the target's full-attention layers (norms of queries and keys, an output gate).

Its normed output gives the logits by the target's output layer, and is the hidden state of the next level. Weights of
norms are offsets from 1, as in the target.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.hidden_state.layer import Attend, DecoderLayer, Rotation
from mmspec.drafters.shape import RopeShape


class OffsetNorm(nn.Module):
    """RMSNorm over the last axis, computed in float32, whose weight is an offset from 1.

    Args:
        shape: of the weight, broadcast to the inputs.
        eps: epsilon.
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class GatedLayer(DecoderLayer):
    """Decoder layer with norms of queries and keys, (heads + kv_heads, head_dim), and a gate of what the heads read."""

    def __init__(self, config: RopeShape) -> None:
        super().__init__(config, config.hidden_size, input_norm=True, norm=OffsetNorm)
        self.gate = nn.Linear(config.hidden_size, config.heads * config.head_dim, bias=False)
        self.head_norm = OffsetNorm((config.heads + config.kv_heads, config.head_dim), config.norm_eps)

    def queries_and_keys(self, qk: Tensor) -> Tensor:
        return self.head_norm(qk)

    def attended(self, read: Tensor, x: Tensor) -> Tensor:
        return read * self.gate(x).sigmoid()

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """(batch, nodes, hidden) -> (batch, nodes, hidden)."""
        x = x + self.attention(self.input_norm(x), rotation, attend)
        return x + self.mlp(x)


class MTPNetwork(nn.Module):
    """See the module."""

    def __init__(self, config: RopeShape) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.norm_eps
        self.embed_norm, self.hidden_norm = OffsetNorm(width, eps), OffsetNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = GatedLayer(config)
        self.norm = OffsetNorm(width, eps)

    def combine(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Layer inputs from embeddings and the hidden states one position before, (..., hidden) each."""
        return self.fc(torch.cat([self.embed_norm(embeds.to(states.dtype)), self.hidden_norm(states)], dim=-1))

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Predicted hidden states, (batch, nodes, hidden).

        Args:
            x: (batch, nodes, hidden) from ``combine``.
            rotation, attend: see ``DecoderLayer.attention``.
        """
        return self.norm(self.layer(x, rotation, attend))

    def begin(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The state of the next level, and nothing else, (..., 0)."""
        return output, output[..., self.config.hidden_size :]
