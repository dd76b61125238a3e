"""Tree support for attention that uses slot indices as positions: ALiBi (BLOOM, Falcon, MPT), windows of GPT-Neo.

ALiBi adds a slope times the key's position to each attention score. GPT-Neo's layers compute their own causal and
window masks. Both use slot indices as positions. During passes, the modelling file's bias function, or the attention of
MPT or GPT-Neo, is replaced by a function that reads the positions of the pass.

Source: ALiBi (arXiv 2108.12409), section 3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cache.tree_cache import cache_in
from mmspec.targets.tree_layers import Place, replaced

_ATTRIBUTE = "slot_positions"
_POSITIONS: ContextVar[Tensor | None] = ContextVar("_POSITIONS", default=None)
"""Positions of the slots in this thread's pass, (batch, slots) int64."""


Replacement = Mapping[Place, Callable[[Any], Any]]
"""Function of a modelling file that uses slot indices, and what it is replaced by; see ``replaced``."""


def slot_attention(config: Any, decoder: nn.Module) -> Replacement | None:
    """The function to replace in passes of a decoder; None if its attention does not use slot indices."""
    module = sys.modules[type(decoder).__module__]
    if getattr(config, "alibi", True) is False:  # Falcon may have rotary embeddings instead
        return None
    if hasattr(module, "build_alibi_tensor"):
        return {(module, "build_alibi_tensor"): _biases}
    if hasattr(module, "MptAttention"):
        return {(module.MptAttention, "forward"): _mpt_attention}
    if hasattr(module, "GPTNeoSelfAttention"):
        return {(module.GPTNeoSelfAttention, "_attn"): _gpt_neo_attention}
    return None


def with_positions(mask: Tensor, positions: Tensor) -> Tensor:
    """Attach slot positions, (batch, slots) int64, to the mask of a pass."""
    setattr(mask, _ATTRIBUTE, positions)
    return mask


@contextmanager
def slot_positions_applied(replacement: Replacement, mask: Tensor | None) -> Iterator[None]:
    """Replace the function during a pass with a mask of ``with_positions``. Other threads still call transformers'
    function."""
    with replaced(replacement):
        token = _POSITIONS.set(getattr(mask, _ATTRIBUTE, None))
        try:
            yield
        finally:
            _POSITIONS.reset(token)


@cache
def _biases(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace ``build_alibi_tensor``: (batch * heads, 1, slots)."""

    @wraps(original)
    def biases(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        positions = _POSITIONS.get()
        if positions is None:
            return original(attention_mask, num_heads, dtype)
        line = attention_mask.new_ones(1, int(positions.max()) + 1, dtype=torch.long)
        by_position = original(line, num_heads, dtype)[:, 0]  # (heads, positions)
        return by_position[:, positions].transpose(0, 1).reshape(-1, 1, positions.shape[1])

    return biases


@cache
def _mpt_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``MptAttention.forward``, which uses equal biases for all rows."""

    @wraps(original)
    def attention(self: Any, hidden_states: Tensor, position_bias: Tensor, **options: Any) -> tuple[Tensor, None]:
        positions = _POSITIONS.get()
        if positions is None:
            return original(self, hidden_states, position_bias, **options)
        states = self.Wqkv(hidden_states)
        if self.clip_qkv:
            states = states.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = states.unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        key, value = cache_in(options).update(key, value, self.layer_idx)
        # Relative to the last position, as in the table: (heads, 1, positions), 0 at its end.
        positions = positions.clamp(max=position_bias.shape[2] - 1)  # no token is emitted after the last position
        bias = position_bias[:, 0, positions - 1 - int(positions.max())].transpose(0, 1).unsqueeze(2)
        bias = bias.to(query.dtype).masked_fill(options["attention_mask"], torch.finfo(query.dtype).min)
        read = nn.functional.scaled_dot_product_attention(query, key, value, bias, scale=self.softmax_scale)
        return self.out_proj(read.transpose(1, 2).flatten(2)), None

    return attention


@cache
def _gpt_neo_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``GPTNeoSelfAttention._attn``, which masks by slot index; the mask of a pass is already causal."""

    @wraps(original)
    def attention(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:
        positions = _POSITIONS.get()
        if positions is None or mask is None:
            return original(self, query, key, value, mask)
        scores = query.float() @ key.float().transpose(-1, -2) + mask
        if self.attention_type == "local":
            distance = positions[:, None, -query.shape[2] :, None] - positions[:, None, None]
            scores = scores.masked_fill(distance >= self.config.window_size, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).to(value.dtype)
        return weights @ value, weights

    return attention
