"""A tiny Gemma-4 target and assistants for it."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from tests.tiny.configs import TINY_SIZES, VOCAB
from tests.tiny.models import gemma4_assistant

WINDOW = 5
_KINDS = ["sliding_attention", "full_attention"]
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "global_head_dim": 24}
_TEXT = {
    **TINY_SIZES,
    **_HEADS,
    "num_hidden_layers": 6,
    "layer_types": _KINDS * 3,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_ORDERED = {"use_ordered_embeddings": True, "num_centroids": 10, "centroid_intermediate_top_k": 3}
CENTROIDS = {"vocab_size": VOCAB - 1, **_ORDERED}


@cache
def target_model(vocab=VOCAB):
    torch.manual_seed(0)
    text = {**_TEXT, "vocab_size": vocab, "vocab_size_per_layer_input": vocab}
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**text)).eval()
    model.lm_head.weight.data.normal_(std=0.5)
    return model


def assistant_of(model, **changes):
    """Two layers, of each kind."""
    made = gemma4_assistant(model, layer_types=_KINDS, sliding_window=WINDOW, **_HEADS | changes)
    if made.masked_embedding is not None:
        order = torch.randperm(made.vocab_size, generator=torch.Generator().manual_seed(3))
        made.masked_embedding.token_ordering.copy_(order)
    return made
