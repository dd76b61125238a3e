"""Network of EAGLE, MSD and FLASH (arXiv 2401.15077, 2505.14260, 2505.12728): one decoder layer between an input
projection and the target's head.

It predicts the target's next hidden state, and with several slots the following ones. Embedding, final norm and head
are the target's and not part of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.hidden_state.layer import Attend, DecoderLayer, Norm, Rotation


class Cell(nn.Module):
    """Recurrent cell between the slots of a pass: a carried state, (..., hidden), is updated by each drafted token and
    predicts the next hidden state."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.first = nn.Linear(2 * width, width)
        self.into = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width, bias=False)
        if config.rank:
            self.narrow = nn.Linear(width, config.rank, bias=False)
            self.head = nn.Linear(config.rank, config.head)
        else:
            self.guess = nn.Linear(width, width)
        # LayerNorm is one kernel; RMSNorm is several on a CPU, half of the cell's time.
        self.norm = nn.LayerNorm(width, config.norm_eps)

    def begin(self, output: Tensor) -> Tensor:
        """Initial carried state from the layer's output: (..., 2 * hidden) -> (..., hidden)."""
        return self.norm(self.first(output))

    def forward(self, embeds: Tensor, carried: Tensor) -> Tensor:
        """Carried state of the next slot, given the embeddings of tokens drafted from ``carried``."""
        return self.carry(self.into(torch.cat([embeds, carried], dim=-1)), carried)

    def carry(self, read: Tensor, carried: Tensor) -> Tensor:
        """``forward`` with the output of ``into``."""
        return self.norm(carried + self.out(F.silu(read)))

    def scores(self, carried: Tensor) -> Tensor:
        """Logits of the draft vocabulary by the low-rank output layer: (..., hidden) -> (..., head)."""
        return self.head(self.narrow(carried))


class EagleNetwork(DecoderLayer):
    """See the module."""

    fc: nn.Linear

    def __init__(self, config: EagleConfig) -> None:
        width = config.hidden_size
        fc = nn.Linear(2 * width, width)
        super().__init__(config, width, qkv_bias=config.qkv_bias, input_norm=config.input_norm, fc=fc)
        self.config = config
        if config.slots > 1:
            self.cell = Cell(config)
        if config.reads:
            self.read_norms = nn.ModuleList(Norm(width, config.norm_eps) for _ in config.reads)
            self.read = nn.Linear(len(config.reads) * width, width, bias=False)
        if config.norm_output:
            self.norm = Norm(width, config.norm_eps)
        if config.confidence:
            self.confidence = nn.Linear(width, 1)

    @property
    def layers(self) -> list[DecoderLayer]:
        return [self]

    def states(self, read: Tensor) -> Tensor:
        """Hidden states that entries take, (..., hidden), from the target's last ones and those of
        ``EagleConfig.reads``, concatenated."""
        if not self.config.reads:
            return read
        last, *layers = read.split(self.config.hidden_size, dim=-1)
        normed = [norm(layer) for norm, layer in zip(self.read_norms, layers, strict=True)]
        return last + self.read(torch.cat(normed, dim=-1))

    def combine(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Layer inputs: the next token's embedding fused with the previous hidden state.

        Args:
            embeds: (batch, nodes, hidden) input embeddings of the target, one position ahead of ``hidden``.
            hidden: (batch, nodes, hidden) last hidden states, of the target or predicted.
        """
        return self.fc(torch.cat([embeds, hidden], dim=-1))

    def begin(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Split the layer's output into predictions and the first slots' carried states (empty for one slot)."""
        width = self.config.hidden_size
        predicted = self.normed(output[..., :width])
        return predicted, self.cell.begin(output) if self.config.slots > 1 else output[..., width:]

    def guess(self, carried: Tensor) -> Tensor:
        """Prediction of a slot after the first from its carried state, (..., hidden) each."""
        return self.normed(self.cell.guess(carried))

    def normed(self, predicted: Tensor) -> Tensor:
        """``predicted`` by ``norm_output``."""
        return self.norm(predicted) if self.config.norm_output else predicted

    def coverage(self, predicted: Tensor, carried: Tensor) -> Tensor:
        """Logit of the target's probability of a node's children together, (..., 1); see ``begin``."""
        return self.confidence(carried if self.config.slots > 1 else predicted)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Predict the next hidden states.

        Args:
            x: (batch, nodes, hidden) from ``combine``.
            rotation: cosines and sines from ``Rotary``, broadcastable to (batch, nodes, heads, head_dim).
            attend: see ``DecoderLayer.attention``.

        Returns:
            (batch, nodes, hidden), or with several slots the input of ``begin``, (batch, nodes, 2 * hidden).
        """
        x = x + self.attention(self.input_norm(x), rotation, attend)
        guess = x + self.mlp(x)
        return guess if self.config.slots == 1 else torch.cat([guess, x], dim=-1)
