"""Architectures of llama.cpp with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec.targets import gguf_dense
from mmspec.targets.gguf_keys import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    HUNYUAN_NORMS,
    MLP,
    ROTARY,
    ROUTED,
    SHARED,
    SIZES,
    Architecture,
    Keys,
    Names,
    alternating_experts,
    decoder,
    expert_keys,
    experts,
    granite,
    mlp,
    rope,
    sliding,
    transposed_experts,
    without,
)

_SOFTMAX, SIGMOID = 1, 2  # llama.cpp's expert_gating_func
_PHI_SCALE = 1.243163121016122  # short_mscale and long_mscale of Phi-3.5-MoE, which its files lack

BIAS: Names = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
SHARED_EXPERTS = mlp("mlp.shared_experts", "_shexp")
_ERNIE_BIAS: Names = {
    "exp_probs_b.bias": ("mlp.gate.moe_statics.e_score_correction_bias", lambda config, bias: bias.view(1, -1))
}
NORMED: Names = {"post_attention_norm": "post_attention_layernorm"}


def _qwen2(keys: Keys) -> dict[str, Any]:
    width = keys("expert_shared_feed_forward_length", keys.uniform("feed_forward_length"))
    return decoder(keys) | {"shared_expert_intermediate_size": width, "norm_topk_prob": False}


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    found = decoder(keys) | sliding(keys, 2)
    found["rope_parameters"]["truncate"] = False
    return found


_OSS: Names = {
    **NORMED,
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    **{f"ffn_{name}_exps": ("mlp.experts.gate_up_proj", alternating_experts) for name in ("gate", "up")},
    "ffn_down_exps": ("mlp.experts.down_proj", transposed_experts),
    **{f"ffn_{name}_exps.bias": ("mlp.experts.gate_up_proj_bias", alternating_experts) for name in ("gate", "up")},
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}


def _granite(keys: Keys) -> dict[str, Any]:
    return granite(keys) | {"shared_intermediate_size": keys("expert_shared_feed_forward_length", 0)}


_GRANITE: Names = {
    "ffn_gate_inp": "block_sparse_moe.router",
    **experts("block_sparse_moe.experts"),
    **dict.fromkeys(
        ("ffn_gate_shexp", "ffn_up_shexp"), ("shared_mlp.input_linear", lambda config, *tensors: torch.cat(tensors))
    ),
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def _routing(keys: Keys) -> dict[str, Any]:
    """Fields of mixtures with leading dense layers, groups of experts and shared experts."""
    return {
        "first_k_dense_replace": keys("leading_dense_block_count", 0),
        "n_group": keys("expert_group_count", 0) or 1,
        "topk_group": keys("expert_group_used_count", 0) or 1,
        "n_shared_experts": keys("expert_shared_count"),
        "norm_topk_prob": keys("expert_weights_norm", False),
        "routed_scaling_factor": keys("expert_weights_scale", 0.0) or 1.0,
        "num_mtp_layers": 0,  # set aside
    }


def _sigmoid(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", SIGMOID)
    return decoder(keys) | _routing(keys) | {"sliding_window": None}


def _minimax(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", SIGMOID)
    return decoder(keys)


def _deepseek(keys: Keys) -> dict[str, Any]:
    vocab, layers = keys.tensors["token_embd.weight"].shape[0], keys("block_count")
    glm = vocab == 154_880 and layers in (47, 48)  # GLM-4.7-Flash
    keys.expect("expert_gating_func", default := SIGMOID if glm else _SOFTMAX, SIGMOID, _SOFTMAX, 0)
    sigmoid = (keys("expert_gating_func", 0) or default) == SIGMOID
    rotated, size = keys("rope.dimension_count"), keys("attention.key_length_mla", keys("attention.key_length"))
    found = _routing(keys) | {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": keys.uniform("attention.head_count"),
        "q_lora_rank": keys("attention.q_lora_rank", None),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": keys("attention.value_length_mla", keys("attention.value_length")),
        "rope_parameters": {name: one for name, one in rope(keys).items() if name != "partial_rotary_factor"},
    }
    if not sigmoid:  # DeepSeek-V2
        keys.expect("expert_weights_norm", False)
    if found["n_group"] > 1:
        found["topk_method"] = "group_limited_greedy"
    scale = keys("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    if scale and found["rope_parameters"]["rope_type"] == "yarn":
        found["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _unabsorbed(config: Any, keys: Tensor, values: Tensor) -> Tensor:
    """Joins key rows, (heads, latent, features), and value rows, (heads, features, latent), by head."""
    return torch.cat((keys.mT, values), 1).flatten(0, 1)


LATENT: Names = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": ("self_attn.kv_b_proj", _unabsorbed),
    "attn_v_b": ("self_attn.kv_b_proj", _unabsorbed),
}


def _ernie(keys: Keys) -> dict[str, Any]:
    keys("expert_shared_feed_forward_length", None)  # the width of an expert times their number
    keys.expect("interleave_moe_layer_step", 1)
    return decoder(keys) | {
        "moe_layer_start_index": keys("leading_dense_block_count", 0),
        "moe_num_shared_experts": keys("expert_shared_count", 0),
    }


def _hunyuan(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_shared_count", 1)
    keys.expect("expert_shared_feed_forward_length", keys.uniform("feed_forward_length"))
    return decoder(keys)


_HUNYUAN: Names = {
    **HUNYUAN_NORMS,
    "ffn_gate_inp": "mlp.gate.wg",
    **mlp("mlp.shared_mlp", "_shexp"),
}


def _phi(keys: Keys) -> dict[str, Any]:
    window = keys("attention.sliding_window", 0) or None
    found = decoder(keys) | {"sliding_window": window}
    if found["rope_parameters"]["rope_type"] == "longrope":
        found["rope_parameters"] |= {"short_mscale": _PHI_SCALE, "long_mscale": _PHI_SCALE}
    return found


_FEW = without(EXPERTS, "expert_feed_forward_length")
_LOCAL = _FEW | {"expert_count": "num_local_experts"}
_NAMED = SIZES | expert_keys("n_routed_experts")
_BIASED: Names = {**ATTENTION, **MLP, **ROUTED, **SHARED_EXPERTS, **BIAS}
_BESIDE: Names = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    **experts("experts"),
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{part}": f"post_feedforward_layernorm_{part}" for part in (1, 2)},
}

_QWEN3 = Architecture(
    *("qwen3_moe", SIZES | EXPERTS, {**ATTENTION, **HEAD_NORMS, **ROUTED}),
    more=lambda keys: decoder(keys) | {"norm_topk_prob": True},
)

ARCHITECTURES: dict[str, Architecture] = {
    "qwen2moe": Architecture("qwen2_moe", SIZES | EXPERTS, {**ATTENTION, **ROUTED, **SHARED}, more=_qwen2),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _QWEN3),
    "gpt-oss": Architecture(
        "gpt_oss", SIZES | expert_keys("num_local_experts", "intermediate_size"), {**ATTENTION, **_OSS}, more=_gpt_oss
    ),
    "granitemoe": Architecture("granitemoeshared", SIZES | _LOCAL, {**ATTENTION, **ROTARY, **_GRANITE}, more=_granite),
    "deepseek2": Architecture(
        "deepseek_v3", _NAMED | {"attention.kv_lora_rank": "kv_lora_rank"}, {**_BIASED, **LATENT}, more=_deepseek
    ),
    "glm4moe": Architecture("glm4_moe", _NAMED, {**_BIASED, **NORMED, **HEAD_NORMS}, more=_sigmoid),
    "minimax-m2": Architecture(
        "minimax_m2",
        SIZES | expert_keys("num_local_experts", "intermediate_size"),
        {**ATTENTION, **HEAD_NORMS, **ROUTED, "exp_probs_b.bias": "mlp.e_score_correction_bias"},
        more=_minimax,
    ),
    "olmoe": Architecture("olmoe", SIZES | _FEW, {**ATTENTION, **HEAD_NORMS, **ROUTED}, more=decoder),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        SIZES | expert_keys("moe_num_experts") | {"expert_used_count": "moe_k"},
        {**ATTENTION, **MLP, **ROUTED, **SHARED_EXPERTS, **_ERNIE_BIAS},
        more=_ernie,
    ),
    "dots1": Architecture("dots1", _NAMED, {**_BIASED, **HEAD_NORMS}, more=_sigmoid),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        SIZES | expert_keys("num_experts", "intermediate_size") | {"expert_used_count": "moe_topk"},
        {**ATTENTION, **ROUTED, **_HUNYUAN},
        more=_hunyuan,
    ),
    "phimoe": Architecture("phimoe", SIZES | _LOCAL, {**ATTENTION, **ROUTED, "ffn_gate_inp": "mlp.router"}, more=_phi),
}
_GEMMA4 = gguf_dense.ARCHITECTURES["gemma4"]
WITH_EXPERTS: dict[str, Architecture] = {
    "gemma4": replace(
        _GEMMA4,
        keys={**_GEMMA4.keys, **expert_keys("num_experts"), "expert_used_count": "top_k_experts"},
        names=_GEMMA4.names | _BESIDE,
    ),
    "llama": Architecture("mixtral", SIZES | _LOCAL, {**ATTENTION, **ROTARY, **ROUTED}, more=decoder),
}
"""Rows of names that stand for a dense model in files without experts."""
