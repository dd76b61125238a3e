"""Base class of drafters that are at the target's own positions (EAGLE-3, DFlash)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.core.target import Prompt, TargetOutput
from mmspec.drafters.captured import AHEAD
from mmspec.drafters.hidden_state.drafter import HiddenStateDrafter
from mmspec.drafters.hidden_state.entries import axis_positions, counted_positions, last_tokens
from mmspec.drafters.hidden_state.layer import Rotation, rotary_of
from mmspec.ops import kernels


class PositionedDrafter(HiddenStateDrafter):
    """A ``HiddenStateDrafter`` with an entry per token of the prompt, whose rotary positions are the target's: with
    several axes at images, if the network's configuration has ``mrope_section``.

    Attributes:
        counts_tokens: without ``mrope_section``, positions count tokens where the target has several axes; else they
            are the largest of its axes.

    Args:
        network: the shape of its layers is a ``RotaryShape``.
        draft_ids: see ``HiddenStateDrafter``.
        **settings: top_k, depth, total_tokens, verifier, too.
    """

    counts_tokens = True

    def __init__(self, network: Any, draft_ids: Tensor | None = None, **settings: Any) -> None:
        rotary, self._axis = rotary_of(self.shape_of(network))
        super().__init__(network, rotary, draft_ids, **settings)

    def inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        return states

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        mask = None if prompt.attention_mask is None else prompt.attention_mask.bool()
        first = last_tokens(history, prompt.input_ids.device)
        x = self.inputs(torch.cat([prompt.input_ids[:, 1:], first], dim=1), self.states(output))
        self.join(len(history), kernels.static_shapes(x.device))
        rotation, position = self._places(output, prompt, x)
        self.start(x, rotation, mask, position, history)

    def _places(self, output: TargetOutput, prompt: Prompt, x: Tensor) -> tuple[Rotation, Tensor]:
        """Rotation of the prompt's entries, and the position of each row's next entry, (batch,) int64."""
        length, (at, tokens) = prompt.input_ids.shape[1], counted_positions(prompt)
        found = None if self._axis is None and self.counts_tokens else axis_positions(prompt, output)
        if found is None:
            self._rotary.reserve(length + AHEAD, x)
            return self._rotary(at), tokens
        axes, position = found
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
