"""Tiny models whose decoder layers can be merged, for tests of packed weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

VOCAB = 120
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=128)

GEMMA3 = partial(
    Gemma3TextConfig,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=8,
    query_pre_attn_scalar=32,
)
"""Windows that tests exceed, and two sets of rotary frequencies."""


def model_of(config_class: Any, **changes: Any) -> Any:
    """A random model whose norms and biases differ from their defaults."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def layer_by_layer(model: Any) -> Any:
    """The model, each of whose merged layers computes its own output from now on."""
    for layer in model.get_decoder().layers:
        layer.stack = None
    return model
