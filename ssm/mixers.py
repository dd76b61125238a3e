"""Adapters: replace methods of modules whose recurrence is not a function in their modelling file.

An adapter computes a mixer from its sub-modules. States are always in the cache, even in prefill: such mixers otherwise
keep them in the module or in a cache of their own class.

Some modules other than attention also read more than their own token. Modules that read the last few tokens, but are
not depthwise convolutions, get each node's window as a sequence; modules that read positions, assumed equal for all
rows, are called row by row.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmspec.ssm.ops import DepthIndex, commit_lru, commit_scan, depth_index, tree_lru
from mmspec.ssm.recurrences import CONVOLUTION, Adapter, Functions, Mamba2

if TYPE_CHECKING:
    from mmspec.ssm.cache import StateCache


def _attention(
    states: StateCache, original: Adapter, mixer: Any, hidden_states: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Replace ``MiniMaxLightningAttention.forward``."""
    if not states.verifying:
        options = {name: value for name, value in options.items() if value is not states}
        y, state = original(mixer, hidden_states=hidden_states, **options)
        states.update_recurrent_state(state.transpose(2, 3), mixer.layer_idx)
        return y, None
    states.update_recurrent_state(None, mixer.layer_idx)
    projected = mixer.act_fn(mixer.qkv_proj(hidden_states))
    q, k, v = projected.unflatten(2, (mixer.num_attention_heads, -1)).chunk(3, dim=-1)
    y, _ = states.scan(q, k, v, mixer.slope_rate)
    gate = torch.sigmoid(mixer.output_gate(hidden_states))
    return mixer.out_proj(gate * mixer.norm(y.flatten(2))), None


def _model(states: StateCache, original: Adapter, model: Any, **options: Any) -> Any:
    """Replace ``MiniMaxModel.forward``, which rejects other cache classes if ``use_cache`` is set."""
    return original(model, **{**options, "use_cache": False})


class LightningAttention(Mamba2):
    """Lightning attention: Mamba-2's scan with a constant decay per head and without step sizes.

    State: (heads, value_dim, key_dim); gates: keys and values, (2 heads key_dim,).

    Source: MiniMax-01 (arXiv 2501.08313), section 2.2; Lightning Attention-2 (arXiv 2401.04658).
    """

    name: ClassVar[str] = "lightning attention"
    functions: ClassVar[Functions] = {
        "MiniMaxLightningAttention.forward": (
            _attention,
            ("hidden_states", "position_embeddings", "attention_mask"),
        ),
        "MiniMaxModel.forward": (_model, ("use_cache",)),
    }

    def read(  # type: ignore[override]
        self, place: int, state: Tensor, ancestors: Tensor, q: Tensor, k: Tensor, v: Tensor, slope: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps = torch.ones(q.shape[:3], dtype=torch.float32, device=q.device)
        y, _ = super().read(place, state, ancestors, v, steps, -slope.flatten().float(), k, q)
        return y.to(v.dtype), torch.cat([k, v], dim=2).flatten(2)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        assert self._stored_a is not None
        a = self._stored_a[part].flatten()
        k, v = (t.flatten(2).unflatten(2, (len(a), -1)) for t in gates.chunk(2, dim=-1))
        commit_scan(v, torch.ones(v.shape[:3], dtype=torch.float32, device=v.device), a, k, state, path)


def _block(
    states: StateCache,
    original: Adapter,
    mixer: Any,
    input_states: Tensor,
    position_ids: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Replace ``RecurrentGemmaRecurrentBlock.forward``.

    Masks padding before the convolution, which transformers does not.
    """
    x, conv = mixer.linear_x(input_states).transpose(1, 2), mixer.conv_1d
    if not states.verifying:
        index = torch.arange(x.shape[2], device=x.device)
        first = torch.where(position_ids == 0, index, 0).amax(1, keepdim=True)  # padding also has position 0
        x = x * (index >= first).unsqueeze(1)
    states.update_conv_state(x, mixer.layer_idx, conv_kernel_size=mixer.conv1d_width)
    x = states.conv(x, conv.weight.squeeze(1), conv.bias) if states.verifying else conv(x)[..., : x.shape[2]]
    lru = copy.copy(mixer.rg_lru)  # the original stores states in the module
    lru.recurrent_states = states if states.verifying else None
    y = lru(x.transpose(1, 2), position_ids) * mixer.act_fn(mixer.linear_y(input_states))
    states.update_recurrent_state(lru.recurrent_states, mixer.layer_idx)
    return mixer.linear_out(y), None


def _scan(
    states: StateCache, original: Adapter, lru: Any, hidden_states: Tensor, recurrent_gate: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Replace ``RecurrentGemmaRglru._rnn_scan`` in verify passes, where no node is the first token of its sequence."""
    return states.scan(hidden_states, recurrent_gate)


class RGLRU:
    """RG-LRU: a gated linear recurrence. State: (channels,); gates: decays and scaled inputs, (2 channels,).

    Gates are computed from the convolution's output by projections of the mixer, so a commit reads the recorded gates.

    Source: Griffin (arXiv 2402.19427), section 2.4.
    """

    name: ClassVar[str] = "RG-LRU"
    functions: ClassVar[Functions] = {
        "RecurrentGemmaRecurrentBlock.forward": (_block, ("input_states", "position_ids")),
        "RecurrentGemmaRglru._rnn_scan": (_scan, ("hidden_states", "recurrent_gate", "recurrent_states")),
    }

    def __init__(self, layers: int) -> None:
        self._levels: DepthIndex | None = None

    def read(self, place: int, state: Tensor, ancestors: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        if place == 0:
            self._levels = depth_index(ancestors)
        assert self._levels is not None
        return tree_lru(x, a, state, self._levels).to(x.dtype), torch.cat([a, x], dim=-1)

    def commit(self, part: slice, channels: Tensor, gates: Tensor, state: Tensor, path: Tensor) -> None:
        a, x = gates.chunk(2, dim=-1)
        commit_lru(x.flatten(2), a.flatten(2), state, path)


def _projections(
    states: StateCache, original: Adapter, module: Any, hidden_states: Tensor, cache: Any, conv_mask: Any
) -> Any:
    """Replace ``ZayaCCAProjection.forward``, called with positional arguments: two convolutions and delayed values."""

    def project(hidden: Tensor) -> Any:
        return original(module, hidden, None, conv_mask)

    return states.windowed((module.layer_idx, 0), module.conv_kernel_size + 1, project, hidden_states, mask=conv_mask)


def _dynamic_convolution(
    states: StateCache,
    original: Adapter,
    module: Any,
    hidden_states: Tensor,
    dynamic_input: Tensor,
    conv_mask: Any,
    **cache: Any,
) -> Any:
    """Replace ``Inkling2DynamicShortConvolution.forward``, whose weights depend on the token."""
    key, convolve = (module.layer_idx, module.conv_idx), partial(original, module, conv_mask=conv_mask)
    return states.windowed(key, module.conv_kernel_size, convolve, hidden_states, dynamic_input, mask=conv_mask)


def _relative_logits(
    states: StateCache, original: Adapter, module: Any, relative_states: Tensor, *positions: Tensor
) -> Tensor:
    """Replace ``InklingRelativeLogits.forward``."""
    return states.by_row(partial(original, module), relative_states)


def _position_bias(
    states: StateCache,
    original: Adapter,
    module: Any,
    hidden_states: Tensor,
    relative_distance: Tensor,
    *positions: Any,
) -> Tensor:
    """Replace ``Inkling2RelativePositionBias.forward``."""

    def biased(hidden: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return original(module, hidden, queries[:, None] - keys, queries[None])

    return states.by_row(biased, hidden_states)


_RELATIVE = _relative_logits, ("relative_states", "query_positions", "key_positions")
_WINDOWED = ("hidden_states", "conv_mask")

INKLING: Functions = {**CONVOLUTION, "InklingRelativeLogits.forward": _RELATIVE}
INKLING2: Functions = {
    **CONVOLUTION,
    "Inkling2DynamicShortConvolution.forward": (_dynamic_convolution, (*_WINDOWED, "dynamic_input")),
}
_BIAS = _position_bias, ("hidden_states", "relative_distance", "position_ids")
INKLING2_BIASES: Functions = {
    "Inkling2RelativeLogits.forward": _RELATIVE,  # transformers 5.23 and earlier
    "Inkling2RelativePositionBias.forward": _BIAS,
}
ZAYA: Functions = {"ZayaCCAProjection.forward": (_projections, _WINDOWED)}
