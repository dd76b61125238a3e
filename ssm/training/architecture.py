"""Architectures of small hybrid models: the embedded one, Mamba-2 and attention in transformers' Bamba, and one with
Gated DeltaNet in transformers' Qwen3.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BambaConfig, BambaForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from mmspec.training.embedded import SPECIAL

STEP_SIZES = (1e-3, 1e-1)
"""Initial step sizes dt of a layer's first and last head, at zero input (arXiv 2312.00752, section 3.6)."""

MAMBA2, GATED_DELTANET = "mamba2", "gated-deltanet"
"""Kinds of recurrent layers."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of the model, in transformers' Bamba or Qwen3.5; `context` and `vocabulary` in tokens."""

    width: int = 192
    layers: int = 8
    attention: tuple[int, ...] = (2, 6)
    """Indices of the attention layers; all others are recurrent."""
    heads: int = 3
    kv_heads: int = 1
    mamba_heads: int = 6
    """Heads of a recurrent layer, whose inner width is twice `width`. In Gated DeltaNet, two heads share a key."""
    state: int = 64
    """State size per channel; in Gated DeltaNet, the width of a key."""
    mlp: int = 384
    context: int = 1024
    vocabulary: int = 1024
    recurrent: str = MAMBA2
    """Kind of the recurrent layers, a key of `ARCHITECTURES`."""


ARCHITECTURES = {
    MAMBA2: Architecture(),
    GATED_DELTANET: Architecture(128, 6, (2, 5), 2, 1, 4, 64, 256, recurrent=GATED_DELTANET),
}
"""The models that `mmspec train tiny-hybrid` trains: the embedded one, and a smaller one with Gated DeltaNet."""


def _common(size: Architecture) -> dict[str, Any]:
    """Fields of both configurations. The ids of special tokens are their indices in `SPECIAL`."""
    pad, begin, end = range(len(SPECIAL))
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.mlp,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": size.context,
        "tie_word_embeddings": True,
        "pad_token_id": pad,
        "bos_token_id": begin,
        "eos_token_id": end,
    }


def bamba_config(size: Architecture) -> BambaConfig:
    """Returns the transformers configuration of a Mamba-2 hybrid of these sizes."""
    return BambaConfig(
        attn_layer_indices=list(size.attention),
        mamba_n_heads=size.mamba_heads,
        mamba_d_head=2 * size.width // size.mamba_heads,
        mamba_d_state=size.state,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        **_common(size),
    )


def qwen_config(size: Architecture) -> Qwen3_5TextConfig:
    """Returns the configuration of a Qwen3.5 of these sizes."""
    return Qwen3_5TextConfig(
        layer_types=[
            "full_attention" if layer in size.attention else "linear_attention" for layer in range(size.layers)
        ],
        head_dim=size.width // size.heads,
        linear_num_key_heads=size.mamba_heads // 2,
        linear_num_value_heads=size.mamba_heads,
        linear_key_head_dim=size.state,
        linear_value_head_dim=2 * size.width // size.mamba_heads,
        **_common(size),
    )


def new_model(size: Architecture) -> PreTrainedModel:
    """Returns a model with random weights.

    The initial step sizes of its heads are spread over `STEP_SIZES`. With transformers' own, 1.3 for all heads, states
    decay within a token or two.
    """
    deltanet = size.recurrent == GATED_DELTANET
    model = Qwen3_5ForCausalLM(qwen_config(size)) if deltanet else BambaForCausalLM(bamba_config(size))
    slow, fast = (math.log(size) for size in STEP_SIZES)
    steps = torch.linspace(slow, fast, size.mamba_heads).exp()
    for module in model.modules():
        if isinstance(module, BambaMixer | Qwen3_5GatedDeltaNet):
            module.dt_bias.data.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
    return model
