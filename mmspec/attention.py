"""Attention under a tree's mask, for the layers of transformers' own models.

transformers repeats keys and values for grouped queries as soon as there is a mask, over the whole prefix and in every
layer. On a CPU, torch's attention takes groups and a mask together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "mmspec_tree"


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls them.

    Args:
        query: (batch, heads, nodes, head_dim).
        key, value: (batch, kv_heads, slots, head_dim), not repeated.
        attention_mask: (batch, 1, nodes, slots), bool or additive.

    Returns:
        (batch, nodes, heads, head_dim), and no weights.
    """
    grouped = attention_mask is not None and key.shape[1] < query.shape[1] and query.device.type == "cpu"
    if not grouped or any(options.get(name) for name in ("dropout", "softcap")) or "position_bias" in options:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    read = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, enable_gqa=True
    )
    return read.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def install(model: PreTrainedModel) -> None:
    """Let the layers of a model's decoder that run torch's attention run ``tree_attention``."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa" and model.device.type == "cpu":
        model.set_attn_implementation(NAME if config is model.config else {"text_config": NAME})
