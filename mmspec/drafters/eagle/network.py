"""Network of EAGLE, MSD and FLASH (arXiv 2401.15077, 2505.14260, 2505.12728): one decoder layer between an input
projection and the target's head.

It predicts the target's next hidden state, and with several slots the following ones. Embedding, final norm and head
are the target's and not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.fields import Within
from mmspec.drafters.hidden_state.layer import Attend, DecoderLayer, LayerShape, Norm, Rotation
from mmspec.errors import UserError


@dataclass(frozen=True)
class EagleConfig(LayerShape):
    """Configuration of an ``EagleNetwork``: a ``LayerShape`` of the target's hidden size, and

    Attributes:
        input_norm: RMSNorm before the attention; used by published drafters for Qwen2-VL, but not for LLaVA.
        qkv_bias: bias on queries, keys and values.
        slots: tokens drafted per pass of the layer (FLASH); 1 is EAGLE.
        reads: layers of the target whose inputs are normed, projected and added to its last hidden state (as EAGLE-3
            reads several layers, arXiv 2503.01840).
        norm_output: RMSNorm of predicted hidden states, before the head and before they are fed back (EAGLE-3.1).
        rank: of an output layer of the cell's own for the slots after the first, in place of the target's head
            (SlimSpec, arXiv 2605.10453); 0 uses the head. A tree is then at most ``slots`` levels deep.
        head: rows of that output layer, the draft vocabulary.
        confidence: an output that predicts the target's probability of a node's drafted children together (DSpark,
            arXiv 2607.05147).
    """

    input_norm: bool = False
    qkv_bias: bool = False
    slots: Annotated[int, Within(1, 64)] = 1
    reads: list[int] = field(default_factory=list)
    norm_output: bool = False
    rank: Annotated[int, Within(0, 2**16)] = 0
    head: Annotated[int, Within(0, 2**24)] = 0
    confidence: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads and min(self.reads) < 0:
            raise UserError(f"reads must name layers, from 0 on: got {self.reads}")
        if bool(self.rank) != bool(self.head):
            raise UserError(f"rank and head must both be 0 or neither: got {self.rank} and {self.head}")
        if self.rank and self.slots == 1:
            raise UserError(f"rank must be 0 with one slot per pass: got {self.rank}")


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
        fused: Tensor = self.fc(torch.cat([embeds, hidden], dim=-1))
        return fused

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
