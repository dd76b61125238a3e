"""Models to split over devices or ranks: a Llama with a tokenizer, an EAGLE-3 head for it, and what both answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from mmspec.pipeline import Pipeline
from tests.eagle3 import LLAMA3, cut, head_tensors, write_head
from tests.model_folders import text_config, tokenizer

LAYERS, VOCAB = 4, 320
PROMPTS = ("A red circle is left of a small blue square", "Describe the image", "a star has five points. " * 3)
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5})
"""Greedy decoding, and sampling."""


def save_model(folder: Path) -> Path:
    """A Llama of random weights that does not end its answers."""
    torch.manual_seed(3)
    config = text_config(VOCAB)
    config.num_hidden_layers, config.eos_token_id = LAYERS, None
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer(VOCAB).save_pretrained(folder)
    return folder


def save_head(folder: Path) -> Path:
    """An EAGLE-3 head of random weights, without an embedding of its own."""
    config = cut(LLAMA3, reads=[1, 2, 3], vocab_size=VOCAB)
    return write_head(folder, config, head_tensors(config, seed=1))


def answers(pipe: Pipeline, nodes: int = 7, tokens: int = 12) -> list[list[int]]:
    """Tokens of all prompts in all settings, decoded together."""
    requests = [{"prompt": prompt} for prompt in PROMPTS]
    found = []
    for setting in SETTINGS:
        found += pipe.generate_batch(requests, max_new_tokens=tokens, num_draft_tokens=nodes, **setting)
    return [one.token_ids for one in found]
