"""Architectures of llama.cpp with dense layers of attention."""

from __future__ import annotations

from typing import Any

from mmspec.targets.gguf_keys import ATTENTION, HEAD_NORMS, MLP, ROTARY, SIZES, Architecture, Keys, decoder


def _llama(keys: Keys) -> dict[str, Any]:
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}
    return decoder(keys) | {name: tensor in keys.tensors for name, tensor in biases.items()}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", SIZES, ATTENTION | ROTARY | MLP, more=_llama),
    "qwen2": Architecture("qwen2", SIZES, ATTENTION | MLP, more=decoder),
    "qwen3": Architecture("qwen3", SIZES, ATTENTION | HEAD_NORMS | MLP, more=decoder),
}
