"""Base class of drafters that are at the target's own positions (EAGLE-3, DFlash)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.core.target import Prompt, TargetOutput
from mmspec.drafters.hidden_state.drafter import AHEAD, HiddenStateDrafter
from mmspec.drafters.hidden_state.layer import Rotation, rotary_of
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device


class PositionedDrafter(HiddenStateDrafter):
    """A ``HiddenStateDrafter`` with an entry per token of the prompt, whose rotary positions are the target's: with
    several axes at images, if the network's configuration has ``mrope_section``.

    Attributes:
        counts_tokens: without ``mrope_section``, positions count tokens where the target has several axes; else they
            are the largest of its axes.

    Args:
        network: the shape of its layers is a ``RotaryShape``.
        layers, draft_ids: see ``HiddenStateDrafter``.
        **settings: top_k, depth, total_tokens, verifier, too.
    """

    counts_tokens = True
    reads_published = True

    def __init__(self, network: Any, layers: int, draft_ids: Tensor | None = None, **settings: Any) -> None:
        rotary, self._axis = rotary_of(self.shape_of(network))
        super().__init__(network, rotary, layers, draft_ids, **settings)

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        return states

    def prompt_inputs(self, prompt: Prompt, output: TargetOutput, first: Tensor) -> Tensor:
        """Network inputs of a prompt's entries, (batch, length, any).

        Args:
            first: (batch, 1) int64, the tokens after the prompt.
        """
        return self.inputs(first, self.states(output))

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        mask = None if prompt.attention_mask is None else prompt.attention_mask.bool()
        x = self.prompt_inputs(prompt, output, on_device([[row[-1]] for row in history], prompt.input_ids.device))
        self.join(len(history), kernels.static_shapes(x.device))
        rotation, position = self._places(output, prompt, mask, x)
        self.start(x, rotation, mask, position, history)

    def _places(self, output: TargetOutput, prompt: Prompt, mask: Tensor | None, x: Tensor) -> tuple[Rotation, Tensor]:
        """Rotation of the prompt's entries, and the position of each row's next entry, (batch,) int64."""
        batch, length = prompt.input_ids.shape
        tokens = torch.full((batch,), length, device=x.device) if mask is None else mask.sum(1)
        counted = self._axis is None and self.counts_tokens
        if counted or output.positions is None or output.positions.ndim < 3:
            self._rotary.reserve(length + AHEAD, x)
            at: slice | Tensor = slice(0, length) if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
            return self._rotary(at), tokens
        axes = output.positions[-3:].expand(3, batch, length)  # in front of them, a fourth axis counts tokens
        position = axes.amax((0, 2)) + 1
        # Positions of a video's frames follow their times, and may exceed the number of tokens.
        self.beyond = max(self.beyond, int((position - tokens).max()))
        self._rotary.reserve(max(int(position.max()), length) + AHEAD, x)
        if self._axis is None:
            return self._rotary(axes.amax(0)), position
        return self._rotary.by_axis(axes, self._axis), position

    def join(self, rows: int, static_shapes: bool) -> None:
        if not self.rows:
            self.beyond = 0
        super().join(rows, static_shapes)
