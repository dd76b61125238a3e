"""Rotary positions of drafters that take the target's: scaled, over a part of a head, with several axes (M-RoPE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmspec.drafters.hidden_state.layer import Rotary, rotary_frequencies
from mmspec.drafters.shape import RopeShape
from mmspec.errors import UserError, explained

_SCALINGS = ("linear", "llama3", "yarn")  # frequencies that do not depend on the length


def rotary_of(config: RopeShape) -> tuple[Rotary, Tensor | None]:
    """Rotary positions, and for M-RoPE the position axis that each frequency turns with, (head_dim / 2,) int64.

    Of heads that turn in part, the features are in the order of ``turning_order``, and other frequencies are 0.

    Raises:
        UserError: another kind of rotary positions, or invalid ones.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta, **config.rope}
    kind, half = rope["rope_type"], config.head_dim // 2
    if kind not in ("default", *_SCALINGS):
        raise UserError(f"rotary positions must be default, {', '.join(_SCALINGS)}: got {kind!r}")
    with explained(f"rotary positions must be valid: got {rope}", KeyError, TypeError, ValueError, AttributeError):
        turned = config.turned
        if turned % 2 or not 0 < turned <= config.head_dim:
            raise ValueError(f"expected an even number of features that turn, up to {config.head_dim}")
        frequencies, scale = rotary_frequencies(turned, float(rope["rope_theta"])), 1.0
        if kind != "default":
            like = LlamaConfig(
                hidden_size=config.heads * config.head_dim,
                num_attention_heads=config.heads,
                head_dim=config.head_dim,
                rope_parameters={k: v for k, v in rope.items() if not k.startswith("mrope")},
            )
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](like, torch.device("cpu"))
        still = half - len(frequencies)
        axis = None
        if "mrope_section" in rope:
            axis = _axes(rope["mrope_section"], bool(rope.get("mrope_interleaved")), len(frequencies))
            axis = F.pad(axis, (0, still))
    scales = F.pad(torch.full((half - still,), float(scale)), (0, still), value=1.0)
    return Rotary(F.pad(frequencies.float(), (0, still)), scales), axis


def turning_order(head_dim: int, turned: int) -> Tensor:
    """Order of a head's features, (head_dim,) int64, in which those that turn together are half a head apart.

    Models that turn the first ``turned`` features of a head pair them half of these apart, ``rotate`` pairs whole
    heads. Queries and keys in this order have the same products.
    """
    first, second = torch.arange(turned).chunk(2)
    still, last = torch.arange(turned, head_dim).chunk(2) if turned < head_dim else (first[:0], first[:0])
    return torch.cat([first, still, second, last])


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
