"""EAGLE drafter (arXiv 2401.15077): fuses each token's embedding with the target's hidden state.

Image positions are treated like text. A forward pass may draft several slots (see ``EagleConfig``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.drafters.captured import AHEAD
from mmspec.drafters.hidden_state import HiddenStateDrafter, counted_positions, following_embeds
from mmspec.drafters.layer import Attend, DecoderLayer, NativeCell, NodeInputs, Norm, Rotation, TokenLinear
from mmspec.drafters.spec import DrafterSpec, LayerShape
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.validation import option, options


@options
class EagleConfig(LayerShape):
    """Configuration of an ``EagleNetwork``: a ``LayerShape`` of the target's hidden size, and

    Attributes:
        input_norm: RMSNorm before the attention; used by published drafters for Qwen2-VL, but not for LLaVA.
        qkv_bias: bias on queries, keys and values.
        slots: tokens drafted per pass of the layer (FLASH); 1 is EAGLE.
        reads: layers of the target whose inputs are normed, projected and added to its last hidden state (as EAGLE-3
            reads several layers, arXiv 2503.01840).
        rank: rank of the cell's own output layer for the slots after the first, instead of the target's head (SlimSpec,
            arXiv 2605.10453); it limits trees to ``slots`` levels. 0 uses the target's head.
        head: rows of the cell's output layer, the draft vocabulary.
        confidence: an output that predicts the target's probability of a node's children (DSpark, arXiv 2607.05147).
    """

    input_norm: bool = False
    qkv_bias: bool = False
    slots: int = option(1, ge=1, le=64)
    reads: list[int] = option(list, "Also read the inputs of these layers of the target.", default_text="none")
    norm_output: bool = option(False, "Norm of predicted hidden states.")
    rank: int = option(0, ge=0, le=2**16)
    head: int = option(0, ge=0, le=2**24)
    confidence: bool = option(False, "Predict the target's probability of a node's children together.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads and min(self.reads) < 0:
            raise UserError(f"reads must name layers, from 0 on: got {self.reads}")
        if bool(self.rank) != bool(self.head):
            raise UserError(f"rank and head must both be 0 or neither: got {self.rank} and {self.head}")
        if self.rank and self.slots == 1:
            raise UserError(f"rank must be 0 with one slot per pass: got {self.rank}")


class Cell(nn.Module):
    """Recurrent cell over the slots of a pass: each drafted token updates a carried state, (..., hidden), which
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
        read = self.into(torch.cat([embeds, carried], dim=-1))
        return self.norm(carried + self.out(F.silu(read)))

    def scores(self, carried: Tensor) -> Tensor:
        """Logits of the draft vocabulary by the low-rank output layer: (..., hidden) -> (..., head)."""
        return self.head(self.narrow(carried))


class EagleNetwork(DecoderLayer):
    """Network of EAGLE, MSD and FLASH (arXiv 2401.15077, 2505.14260, 2505.12728): one decoder layer between an input
    projection and the target's head.

    It predicts the target's next hidden state, and with several slots also the states after it. Embedding, final norm
    and head are the target's and not part of the network.
    """

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
        """Hidden states of entries, (..., hidden), from the target's concatenated last and ``reads`` states."""
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
        """Apply the output norm, if configured."""
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


@dataclass
class Entries:
    """Drafter inputs for prompts, one entry per token.

    Attributes:
        embeds: (batch, entries, hidden), input embeddings, one position ahead of ``hidden``.
        hidden: (batch, entries, hidden), the target's hidden states after ``EagleNetwork.states``.
        mask: (batch, entries) bool, False at left padding; None without padding.
        at: positions of the entries, (batch, entries) int64 or a slice.
        visual: (batch, entries) bool, True at visual features; None without images.
    """

    embeds: Tensor
    hidden: Tensor
    mask: Tensor | None
    at: Tensor | slice
    visual: Tensor | None


class Eagle(HiddenStateDrafter):
    """EAGLE drafter, for any target that provides hidden states."""

    name: ClassVar[str] = "eagle"
    config_class = EagleConfig
    network_class: ClassVar[type[EagleNetwork]] = EagleNetwork

    def __init__(self, network: EagleNetwork, draft_ids: Tensor | None = None, **settings: Any) -> None:
        config = network.config
        super().__init__(network, draft_ids, **settings)
        if config.rank and self.depth > config.slots:
            raise UserError(f"depth must be at most the {config.slots} slots of a pass, with rank: got {self.depth}")
        if config.head and draft_ids is not None and len(draft_ids) != config.head:
            raise UserError(f"head must have a row per draft token, {len(draft_ids)}: got {config.head}")
        self.features = ("last", *config.reads)

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        layers = getattr(getattr(target, "config", None), "num_hidden_layers", 0)
        if max(self.network.config.reads, default=0) >= layers > 0:
            raise UserError(f"reads must name layers of the target, below {layers}: got {self.network.config.reads}")
        self.keep_to((self.verifier or {}).get("vocab_size"), target)
        head = self.target_head(target)
        inputs = NodeInputs.of(target, self.draft_ids)
        self.node_inputs = TokenLinear(self.network.fc, inputs)
        if self.slots > 1:
            self.cell_input = TokenLinear(self.network.cell.into, inputs)
        self.native = NativeCell.of(self.network, self.cell_input, head) if self.slots > 1 else None
        return head

    @property
    def slots(self) -> int:
        return self.network.config.slots

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        return self.network.combine(self.target.embed(tokens), self.network.states(states))

    def adjusted(self, tokens: Tensor, log_probs: Tensor, predicted: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        if not self.network.config.confidence:
            return tokens, log_probs
        together = self.network.coverage(predicted, carried.to(predicted.dtype))
        return tokens, log_probs.log_softmax(-1) + F.logsigmoid(together.float())

    def prompt_inputs(self, entries: Entries) -> Tensor:
        """Network inputs of a prompt, (batch, kept entries, hidden); subclasses may drop some of its entries."""
        return self.network.combine(entries.embeds, entries.hidden)

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        hidden = self.network.states(self.states(output))
        mask = None if prompt.attention_mask is None else prompt.attention_mask.bool()
        at, position = counted_positions(prompt)
        embeds = following_embeds(self.target, prompt, output, history)
        visual = None if output.visual is None else F.pad(output.visual[:, 1:], (0, 1))
        if visual is not None and mask is not None:
            visual = visual & mask  # an image at the start of a row has no entry for its first token
        self.join(len(history), kernels.static_shapes(hidden.device))
        entries = Entries(embeds, hidden, mask, at, visual)
        x = self.prompt_inputs(entries)
        self._rotary.reserve(prompt.input_ids.shape[1] + AHEAD, x)
        self.start(x, self._rotary(entries.at), entries.mask, position, history)


SPEC = DrafterSpec(
    "eagle",
    "EAGLE",
    "EAGLE-1 and EAGLE-2 heads, which extrapolate the target's hidden states (arXiv 2401.15077)",
    Eagle,
    weights="required",
    train="msd --no-decoupled",
)
