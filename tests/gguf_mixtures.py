"""Small GGUF files of mixtures, with the keys and the order of weights that llama.cpp's converter writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mmspec.targets import sources
from tests.model_folders import write_gguf
from tests.mtp import nextn_name

package = pytest.importorskip("gguf", reason="the package gguf is not installed")

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.03,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
KEYS = {
    "embedding_length": 32,
    "feed_forward_length": 40,
    "block_count": 3,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 64,
    "attention.layer_norm_rms_epsilon": 0.03,
    "rope.freq_base": 500.0,
    "vocab_size": 96,
    "expert_count": 8,
    "expert_used_count": 3,
}
USED = {"num_experts_per_tok": 3}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 24, **USED}
LOCAL = {"num_local_experts": 8, **USED}
NAMED = {"n_routed_experts": 8, "moe_intermediate_size": 24, **USED}
WIDTH = {"expert_feed_forward_length": 24}
HEAD, HEADS = {"attention.key_length": 16, "attention.value_length": 16}, {"head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8}
ROUTING = {"first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True}
ROUTING |= {"n_group": 4, "topk_group": 2, **NAMED}
ROUTING_KEYS = {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.7, **WIDTH}
ROUTING_KEYS |= {"expert_weights_norm": True, "expert_group_count": 4, "expert_group_used_count": 2}
LATENT = {"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10, "num_key_value_heads": 4}
LATENT_KEYS = {"attention.kv_lora_rank": 12, "rope.dimension_count": 8}
SPLIT_KEYS = {"attention.key_length": 20, "attention.value_length": 12, "attention.head_count_kv": 1}
SPLIT_KEYS |= {"attention.key_length_mla": 14, "attention.value_length_mla": 10}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
GRANITE_KEYS = {"embedding_scale": 3.0, "logit_scale": 2.5, "residual_scale": 0.5, "attention.scale": 0.2}
SIGMOID = {"expert_gating_func": 2}
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}

ROWS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2moe": (
        "QWEN2MOE",
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 56},
        {**WIDTH, "expert_shared_feed_forward_length": 56},
    ),
    "qwen3moe": ("QWEN3MOE", "Qwen3Moe", {**EXPERTS, **HEADS, "norm_topk_prob": True}, {**WIDTH, **HEAD}),
    "qwen3vlmoe": (
        "QWEN3VLMOE",
        "Qwen3Moe",
        {**EXPERTS, **HEADS, "norm_topk_prob": True},
        {**WIDTH, **HEAD, "rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3},
    ),
    "gpt-oss": (
        "GPT_OSS",
        "GptOss",
        {**LOCAL, **HEADS, "sliding_window": 4, "rope_parameters": {**YARN, "truncate": False}},
        {**HEAD, **YARN_KEYS, "attention.sliding_window": 4, "expert_feed_forward_length": 40},
    ),
    "llama": ("LLAMA", "Mixtral", {**LOCAL, **HEADS}, HEAD),
    "granitemoe": (
        "GRANITE_MOE",
        "GraniteMoeShared",
        {**LOCAL, **GRANITE, "shared_intermediate_size": 56},
        {**GRANITE_KEYS, "expert_shared_feed_forward_length": 56},
    ),
    "deepseek2 v2": (
        "DEEPSEEK2",
        "DeepseekV2",
        {**LATENT, **ROUTING, "q_lora_rank": None, "norm_topk_prob": False, "topk_method": "group_limited_greedy"},
        {
            **ROUTING_KEYS,
            **LATENT_KEYS,
            "expert_weights_norm": False,
            "attention.key_length": 14,
            "attention.value_length": 10,
            "attention.head_count_kv": 4,
        },
    ),
    "deepseek2 v3": (
        "DEEPSEEK2",
        "DeepseekV3",
        {
            **LATENT,
            **ROUTING,
            "q_lora_rank": 18,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        {
            **ROUTING_KEYS,
            **LATENT_KEYS,
            **SPLIT_KEYS,
            **YARN_KEYS,
            **SIGMOID,
            "attention.q_lora_rank": 18,
            "rope.scaling.yarn_log_multiplier": 0.07,
        },
    ),
    "glm4moe": (
        "GLM4_MOE",
        "Glm4Moe",
        {**ROUTING, **HEADS, "use_qk_norm": True, "attention_bias": True, "rope_parameters": HALF},
        {**ROUTING_KEYS, **HEAD, "rope.dimension_count": 8},
    ),
    "minimax-m2": (
        "MINIMAXM2",
        "MiniMaxM2",
        {**LOCAL, **HEADS, "rope_parameters": HALF},
        {**HEAD, **SIGMOID, "rope.dimension_count": 8, "expert_feed_forward_length": 40},
    ),
    "olmoe": ("OLMOE", "Olmoe", {"num_experts": 8, **USED, "num_key_value_heads": 4}, {"attention.head_count_kv": 4}),
    "ernie4_5-moe": (
        "ERNIE4_5_MOE",
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "tie_word_embeddings": False},
        {
            **WIDTH,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 48,
        },
    ),
    "dots1": (
        "DOTS1",
        "Dots1",
        {**ROUTING, **HEADS, "num_key_value_heads": 4},
        {**ROUTING_KEYS, **HEAD, **SIGMOID, "attention.head_count_kv": 4},
    ),
    "hunyuan-moe": (
        "HUNYUAN_MOE",
        "HunYuanMoEV1",
        {"num_experts": 8, "moe_topk": 3, **HEADS},
        {**HEAD, "expert_feed_forward_length": 40, "expert_shared_feed_forward_length": 40, "expert_shared_count": 1},
    ),
    "phimoe": (
        "PHIMOE",
        "Phimoe",
        {**LOCAL, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
        {"expert_used_count": 2, "attention.sliding_window": 0},
    ),
}
"""llama.cpp's enumeration, class of transformers, fields and keys that differ."""

OLD = {  # names in transformers 5, and the names that the package knows
    "mlp.router": "mlp.gate",
    "block_sparse_moe.router": "block_sparse_moe.router.layer",
    "shared_mlp.output_linear": "shared_mlp.output_linear",
    "mlp.gate.moe_statics.e_score_correction_bias": "mlp.moe_statics.e_score_correction.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "self_attn.sinks": "self_attn.sinks.weight",
    "_proj_bias": "_proj.bias",
}


def adjacent(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of rotary rows, pair by pair."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def tensors_of(kind: str, config: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights as llama.cpp's converter writes them, by names that the package knows."""
    for name, weight in weights.items():
        for new, old in OLD.items():
            name = name if old in name else name.replace(new, old)
        if "gate_up_proj" in name or "input_linear" in name:
            rows = weight.mT if kind == "GPT_OSS" and weight.ndim == 3 else weight
            axis = 0 if rows.ndim == 2 and kind != "GPT_OSS" else 1
            parts = rows.chunk(2, axis) if kind != "GPT_OSS" else (rows[:, ::2], rows[:, 1::2])
            for part, rows in zip(("gate_proj", "up_proj"), parts, strict=True):
                place = name.replace("gate_up_proj", part).replace("block_sparse_moe", "mlp")
                yield place.replace("shared_mlp.input_linear", f"mlp.shared_expert.{part}"), rows
            continue
        if name.endswith("experts.down_proj") and kind == "GPT_OSS":
            weight = weight.mT
        if kind in ("LLAMA", "GRANITE_MOE") and ("q_proj" in name or "k_proj" in name):
            weight = adjacent(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if "kv_b_proj" in name and config.q_lora_rank:
            rows = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
            yield name.replace("kv_b", "k_b"), rows[:, : config.qk_nope_head_dim].mT
            yield name.replace("kv_b", "v_b"), rows[:, config.qk_nope_head_dim :]
            continue
        name = name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")
        yield name.replace("block_sparse_moe.experts", "mlp.experts"), weight.squeeze()


def build(row: str) -> Any:
    """A random model."""
    _, name, fields, _ = ROWS[row]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**BASE, **fields})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for weight in model.state_dict().values():
        weight += 0.3 * torch.randn_like(weight)
    return model


def save(
    row: str,
    path: Path,
    keys: Any = (),
    tensors: Any = (),
    without: str = "$^",
    also: Mapping[str, Tensor] = MappingProxyType({}),
) -> Any:
    """A model, and its file with further keys and tensors; a key of None and tensors that match ``without`` are left
    out. Weights in ``also`` are converted as the model's."""
    kind, _, _, own = ROWS[row]
    model, architecture = build(row), row.partition(" ")[0]
    names = package.get_tensor_name_map(package.MODEL_ARCH[kind], model.config.num_hidden_layers + 2)
    found = {}
    for name, weight in tensors_of(kind, model.config, {**model.state_dict(), **also}):
        known = (
            nextn_name(name)
            or names.get_name(name, try_suffixes=(".weight", ".bias"))
            or names.get_name(f"{name}.weight", (".weight",))
        )
        assert known is not None, name
        ending = "" if known.endswith((".weight", ".bias")) else ".weight"
        found[known + ending] = weight.contiguous().numpy()
    entries = {"general.architecture": architecture, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    entries |= {
        f"{architecture}.{key}": value for key, value in {**KEYS, **own, **dict(keys)}.items() if value is not None
    }
    found = {name: weight for name, weight in found.items() if not re.search(without, name)}
    write_gguf(path, entries, found | dict(tensors))
    return model


def blocks(name: str, weights: list[Tensor]) -> dict[str, Any]:
    return {f"blk.{layer}.{name}.weight": weight.numpy() for layer, weight in enumerate(weights)}


def load(path: Path) -> Any:
    source = sources.find(str(path))
    return source.model(transformers.AutoModelForCausalLM, source.config(), torch.float32, True)[0].eval()
