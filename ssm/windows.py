"""Modules beside attention whose output at a token depends on more than that token, and their adapters.

Those that read the last few tokens, without being depthwise convolutions, see each node's window as a sequence; those
that read positions, which all rows share, are called for each row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmspec.ssm.recurrences import CONVOLUTION, Adapter, Functions

if TYPE_CHECKING:
    from mmspec.ssm.cache import StateCache


def _projections(
    states: StateCache, original: Adapter, module: Any, hidden_states: Tensor, past_key_values: Any, conv_mask: Any
) -> Any:
    """Replaces ``ZayaCCAProjection.forward``, with two convolutions and a delayed part of the values."""

    def project(hidden: Tensor) -> Any:
        return original(module, hidden, None, conv_mask)

    return states.windowed((module.layer_idx, 0), module.conv_kernel_size + 1, project, hidden_states, mask=conv_mask)


def _dynamic_convolution(
    states: StateCache,
    original: Adapter,
    module: Any,
    hidden_states: Tensor,
    dynamic_input: Tensor,
    past_key_values: Any,
    conv_mask: Any,
) -> Any:
    """Replaces ``Inkling2DynamicShortConvolution.forward``, whose weights depend on the token."""
    key, convolve = (module.layer_idx, module.conv_idx), partial(original, module, conv_mask=conv_mask)
    return states.windowed(key, module.conv_kernel_size, convolve, hidden_states, dynamic_input, mask=conv_mask)


def _relative_logits(
    states: StateCache, original: Adapter, module: Any, relative_states: Tensor, *positions: Tensor
) -> Tensor:
    """Replaces ``InklingRelativeLogits.forward``."""
    return states.by_row(partial(original, module), relative_states)


_RELATIVE = _relative_logits, ("relative_states", "query_positions", "key_positions")
_WINDOWED = ("hidden_states", "past_key_values", "conv_mask")

INKLING: Functions = {**CONVOLUTION, "InklingRelativeLogits.forward": _RELATIVE}
INKLING2: Functions = {
    **CONVOLUTION,
    "Inkling2RelativeLogits.forward": _RELATIVE,
    "Inkling2DynamicShortConvolution.forward": (_dynamic_convolution, (*_WINDOWED, "dynamic_input")),
}
ZAYA: Functions = {"ZayaCCAProjection.forward": (_projections, _WINDOWED)}
