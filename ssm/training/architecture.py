"""Architecture of the embedded hybrid model: Mamba-2 and attention layers in transformers' Bamba."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import BambaConfig, BambaForCausalLM
from transformers.models.bamba.modeling_bamba import BambaMixer

from mmspec.training.tokenizer import SPECIAL

STEP_SIZES = (1e-3, 1e-1)
"""Initial step sizes dt of a layer's first and last head, at zero input (arXiv 2312.00752, section 3.6)."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of the model; `context` and `vocabulary` in tokens."""

    width: int = 192
    layers: int = 8
    attention: tuple[int, ...] = (2, 6)
    """Indices of the attention layers; all others are Mamba-2."""
    heads: int = 3
    kv_heads: int = 1
    mamba_heads: int = 6
    """Heads of a Mamba-2 layer, whose inner width is twice `width`."""
    state: int = 64
    mlp: int = 384
    context: int = 1024
    vocabulary: int = 1024


def bamba_config(size: Architecture) -> BambaConfig:
    """Returns the transformers configuration. The ids of special tokens are their indices in `SPECIAL`."""
    pad, begin, end = range(len(SPECIAL))
    return BambaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        attn_layer_indices=list(size.attention),
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        mamba_n_heads=size.mamba_heads,
        mamba_d_head=2 * size.width // size.mamba_heads,
        mamba_d_state=size.state,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        pad_token_id=pad,
        bos_token_id=begin,
        eos_token_id=end,
    )


def new_model(size: Architecture) -> BambaForCausalLM:
    """Returns a model with random weights.

    The initial step sizes of its heads are spread over `STEP_SIZES`. With transformers' own, 1.3 for all heads, states
    decay within a token or two.
    """
    model = BambaForCausalLM(bamba_config(size))
    slow, fast = (math.log(size) for size in STEP_SIZES)
    steps = torch.linspace(slow, fast, size.mamba_heads).exp()
    for module in model.modules():
        if isinstance(module, BambaMixer):
            module.dt_bias.data.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
    return model
