"""Network of Medusa (arXiv 2401.10774, section 2.1.1) and Hydra (arXiv 2402.05109, section 3).

Heads read the target's last hidden state, after its final norm, at the last token but one: that which predicted the
last token. Head i predicts the (i+1)-th token after the last one. Each is a chain of residual layers ``x + silu(W x)``
and an output layer. Hydra's heads read the embeddings of the tokens in between beside the state, and their first layers
project the residual, too. In Hydra++, the states pass a decoder layer with attention to all earlier ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.hidden_state.layer import Attend, LlamaLayer, Norm, Rotation
from mmspec.drafters.medusa import MedusaConfig
from mmspec.drafters.shape import RotaryShape


class ResidualLayer(nn.Module):
    """``x + silu(linear(x))``; a projection of x where the input is wider."""

    def __init__(self, read: int, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(read, width, bias=bias)
        self.residual = nn.Linear(read, width) if read != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + F.silu(self.linear(x))


class MedusaNetwork(nn.Module):
    """See the module.

    Attributes:
        heads: from what a head reads, (..., reads), to the state of its output layer, (..., hidden).
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.layers: Any = nn.ModuleList([LlamaLayer(config.layer)] if config.prefix else [])
        if config.prefix:
            self.norm = Norm(width, config.layer.norm_eps)
        self.heads: Any = nn.ModuleList()
        for number in range(config.heads):
            reads = [width * (number + 2 if config.grounded else 1)] + [width] * (config.layers - 1)
            self.heads.append(nn.Sequential(*(ResidualLayer(read, width, config.bias) for read in reads)))
        self.outputs: Any = nn.ModuleList(
            nn.Linear(width, config.head, bias=config.head_bias) for _ in range(config.heads if config.head else 0)
        )

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The target's states after the decoder layer, if there is one, (batch, nodes, hidden)."""
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return x

    def state(self, output: Tensor) -> Tensor:
        """What heads read, from the output of ``forward``."""
        return self.norm(output) if self.config.prefix else output

    def scores(self, first: int, states: Sequence[Tensor], head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of the states of the heads from ``first`` on, one after another: (..., n, hidden) each -> (..., all n,
        draft tokens).

        Args:
            head: the target's output layer.
        """
        if not self.config.head:
            return head(torch.cat(list(states), dim=-2))
        own = self.outputs[first : first + len(states)]
        return torch.cat([output(state) for output, state in zip(own, states, strict=True)], dim=-2)

    def take_shape(self, shape: RotaryShape) -> None:
        """Set the shape of the decoder layer, of which its weights only have products."""
        self.config = replace(self.config, prefix=asdict(shape))
        self.layers[0].shape = shape

    @torch.no_grad()
    def start(self, head: Tensor) -> None:
        """Initialise heads and decoder layer as the identity of the state, and output layers.

        Args:
            head: (draft tokens, hidden), weight of the target's output layer.
        """
        for layer in self.layers:
            layer.out.weight.zero_()
            layer.down.weight.zero_()
        for layer in (layer for chain in self.heads for layer in chain):
            for parameter in layer.parameters():
                parameter.zero_()
            if isinstance(layer.residual, nn.Linear):
                layer.residual.weight.fill_diagonal_(1.0)
        for output in self.outputs:
            output.weight.copy_(head)
            if output.bias is not None:
                output.bias.zero_()
