"""Architectures of llama.cpp with mixtures of experts."""

from __future__ import annotations

from typing import Any

from mmspec.targets.gguf_keys import ATTENTION, EXPERTS, HEAD_NORMS, ROUTED, SIZES, Architecture, Keys, decoder


def _normalised(keys: Keys) -> dict[str, Any]:
    return decoder(keys) | {"norm_topk_prob": True}


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3moe": Architecture("qwen3_moe", SIZES | EXPERTS, ATTENTION | HEAD_NORMS | ROUTED, more=_normalised),
}
