"""EAGLE drafter (arXiv 2401.15077): an entry per token, which fuses its embedding with the target's hidden state.

Image positions are fused as text is, from their input embeddings. The network may have several slots per pass (see
``EagleConfig``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.drafters.captured import AHEAD
from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.eagle.network import EagleNetwork
from mmspec.drafters.hidden_state.drafter import HiddenStateDrafter
from mmspec.drafters.hidden_state.entries import counted_positions, following_embeds
from mmspec.drafters.hidden_state.layer import Rotary, TokenLinear, rotary_frequencies
from mmspec.drafters.hidden_state.native import NativeCell
from mmspec.errors import UserError
from mmspec.ops import kernels


@dataclass
class Entries:
    """Entries of prompts.

    Attributes:
        embeds: (batch, entries, hidden), input embeddings, one position ahead of ``hidden``.
        hidden: (batch, entries, hidden), what the network takes of the target's hidden states.
        mask: (batch, entries) bool, False at padding on the left; None without any.
        at: positions of the entries, (batch, entries) int64 or a slice.
        visual: (batch, entries) bool, which embeddings are visual features; None without images.
    """

    embeds: Tensor
    hidden: Tensor
    mask: Tensor | None
    at: Tensor | slice
    visual: Tensor | None


class Eagle(HiddenStateDrafter):
    """EAGLE drafter, for any target that provides hidden states."""

    name: ClassVar[str] = "eagle"
    layout: ClassVar[str | None] = "eagle"
    config_class = EagleConfig
    network_class: ClassVar[type[EagleNetwork]] = EagleNetwork

    def __init__(self, network: EagleNetwork, draft_ids: Tensor | None = None, **settings: Any) -> None:
        config = network.config
        rotary = Rotary(rotary_frequencies(config.head_dim, config.rope_theta))
        super().__init__(network, rotary, draft_ids, **settings)
        if config.rank and self.depth > config.slots:
            raise UserError(f"depth must be at most the {config.slots} slots of a pass, with rank: got {self.depth}")
        if config.head and draft_ids is not None and len(draft_ids) != config.head:
            raise UserError(f"head must have a row per draft token, {len(draft_ids)}: got {config.head}")
        self.features = ("last", *config.reads)

    def scoring(self, target: Target) -> Callable[[Tensor], Tensor]:
        layers = getattr(getattr(target, "config", None), "num_hidden_layers", 0)
        if max(self.network.config.reads, default=0) >= layers > 0:
            raise UserError(f"reads must name layers of the target, below {layers}: got {self.network.config.reads}")
        self.keep_to((self.published or {}).get("vocab_size"), target)
        head = self.target_head(target)
        self.node_inputs = TokenLinear(self.network.fc, target.embed, self.draft_ids)
        if self.slots > 1:
            self.cell_input = TokenLinear(self.network.cell.into, target.embed, self.draft_ids)
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
