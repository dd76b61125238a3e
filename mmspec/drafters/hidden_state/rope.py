"""Rotary positions of drafters that take the target's: scaled, with several axes (M-RoPE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmspec.drafters.hidden_state.layer import Rotary, rotary_frequencies
from mmspec.drafters.shape import RotaryShape
from mmspec.errors import UserError, explained

_SCALINGS = ("linear", "llama3", "yarn")  # frequencies that do not depend on the length


def rotary_of(config: RotaryShape) -> tuple[Rotary, Tensor | None]:
    """Rotary positions, and for M-RoPE the position axis that each frequency turns with, (head_dim / 2,) int64.

    Raises:
        UserError: another kind of rotary positions, or invalid ones.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta, **config.rope}
    kind, half = rope["rope_type"], config.head_dim // 2
    if kind not in ("default", *_SCALINGS):
        raise UserError(f"rotary positions must be default, {', '.join(_SCALINGS)}: got {kind!r}")
    if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"rotary positions must turn whole heads: got a partial_rotary_factor of {factor}")
    with explained(f"rotary positions must be valid: got {rope}", KeyError, TypeError, ValueError, AttributeError):
        frequencies, scale = rotary_frequencies(config.head_dim, float(rope["rope_theta"])), 1.0
        if kind != "default":
            like = LlamaConfig(
                hidden_size=config.heads * config.head_dim,
                num_attention_heads=config.heads,
                head_dim=config.head_dim,
                rope_parameters={k: v for k, v in rope.items() if not k.startswith("mrope")},
            )
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](like, torch.device("cpu"))
        axis = None
        if "mrope_section" in rope:
            axis = _axes(rope["mrope_section"], bool(rope.get("mrope_interleaved")), half)
    return Rotary(frequencies.float(), scale), axis


def _axes(sections: list[int], interleaved: bool, half: int) -> Tensor:
    """The axis of each frequency: in consecutive sections (arXiv 2409.12191), or interleaved as in Qwen3-VL, where
    height and width have every third frequency, as many as their sections."""
    if len(sections) != 3 or sum(sections) != half or min(sections) < 0:
        raise ValueError(f"expected three sections of {half} frequencies in all")
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axis = torch.zeros(half, dtype=torch.long)
    for number in (1, 2):
        axis[number : 3 * sections[number] : 3] = number
    return axis
