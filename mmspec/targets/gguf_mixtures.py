"""Architectures of llama.cpp with mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.targets.gguf_keys import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
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
    experts,
    granite_scales,
    rope,
    sliding,
    transposed_experts,
)

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's expert_gating_func
_PHI_SCALE = 1.243163121016122  # short_mscale and long_mscale of Phi-3.5-MoE, which its files lack

BIAS: Names = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
SHARED_EXPERTS: Names = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_ERNIE_BIAS: Names = {
    "exp_probs_b.bias": ("mlp.gate.moe_statics.e_score_correction_bias", lambda config, bias: bias.view(1, -1))
}
_NORMED: Names = {"post_attention_norm": "post_attention_layernorm"}


def expert_keys(count: str, width: str = "moe_intermediate_size") -> dict[str, str]:
    """Keys of routed experts by the configuration's fields for their count and width."""
    return {"expert_count": count, "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": width}


def _moe(keys: Keys) -> dict[str, Any]:
    return decoder(keys) | {"attention_bias": "blk.0.attn_q.bias" in keys.tensors}


def _normalised(keys: Keys) -> dict[str, Any]:
    return _moe(keys) | {"norm_topk_prob": True}


def _qwen2(keys: Keys) -> dict[str, Any]:
    width = keys("expert_shared_feed_forward_length", keys.uniform("feed_forward_length"))
    bias = "blk.0.attn_q.bias" in keys.tensors
    return decoder(keys) | {"shared_expert_intermediate_size": width, "norm_topk_prob": False, "qkv_bias": bias}


def _qwen3vl(keys: Keys) -> dict[str, Any]:
    for key in ("rope.dimension_sections", "n_deepstack_layers"):  # of images; tokens have one position on all axes
        keys(key, None)
    return _normalised(keys)


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    found = _moe(keys) | sliding(keys, 2)
    found["rope_parameters"]["truncate"] = False
    return found


_OSS: Names = {
    **_NORMED,
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": ("mlp.experts.gate_up_proj", alternating_experts),
    "ffn_up_exps": ("mlp.experts.gate_up_proj", alternating_experts),
    "ffn_down_exps": ("mlp.experts.down_proj", transposed_experts),
    "ffn_gate_exps.bias": ("mlp.experts.gate_up_proj_bias", alternating_experts),
    "ffn_up_exps.bias": ("mlp.experts.gate_up_proj_bias", alternating_experts),
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}


def _granite(keys: Keys) -> dict[str, Any]:
    keys.expect("rope.scaling.finetuned", True)  # otherwise without rotary positions
    found = _moe(keys)
    shared = keys("expert_shared_feed_forward_length", 0)
    return found | granite_scales(keys, found["head_dim"]) | {"shared_intermediate_size": shared}


_GRANITE: Names = {
    "ffn_gate_inp": "block_sparse_moe.router",
    **experts("block_sparse_moe.experts"),
    "ffn_gate_shexp": ("shared_mlp.input_linear", lambda config, *tensors: torch.cat(tensors)),
    "ffn_up_shexp": ("shared_mlp.input_linear", lambda config, *tensors: torch.cat(tensors)),
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
    keys.expect("expert_gating_func", _SIGMOID)
    norms = "blk.0.attn_q_norm.weight" in keys.tensors
    return _moe(keys) | _routing(keys) | {"use_qk_norm": norms, "sliding_window": None}


def _minimax(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", _SIGMOID)
    return decoder(keys)


def _deepseek(keys: Keys) -> dict[str, Any]:
    vocab, layers = keys.tensors["token_embd.weight"].shape[0], keys("block_count")
    glm = vocab == 154_880 and layers in (47, 48)  # GLM-4.7-Flash
    keys.expect("expert_gating_func", default := _SIGMOID if glm else _SOFTMAX, _SIGMOID, _SOFTMAX, 0)
    sigmoid = (keys("expert_gating_func", 0) or default) == _SIGMOID
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
        "use_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


def _hunyuan(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_shared_count", 1)
    keys.expect("expert_shared_feed_forward_length", keys.uniform("feed_forward_length"))
    return _moe(keys)


_HUNYUAN: Names = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def _phi(keys: Keys) -> dict[str, Any]:
    window = keys("attention.sliding_window", 0) or None
    found = _moe(keys) | {"lm_head_bias": "output.bias" in keys.tensors, "sliding_window": window}
    if found["rope_parameters"]["rope_type"] == "longrope":
        found["rope_parameters"] |= {"short_mscale": _PHI_SCALE, "long_mscale": _PHI_SCALE}
    return found


ARCHITECTURES: dict[str, Architecture] = {
    "qwen2moe": Architecture("qwen2_moe", SIZES | EXPERTS, {**ATTENTION, **ROUTED, **SHARED}, more=_qwen2),
    "qwen3moe": Architecture("qwen3_moe", SIZES | EXPERTS, {**ATTENTION, **HEAD_NORMS, **ROUTED}, more=_normalised),
    "qwen3vlmoe": Architecture("qwen3_moe", SIZES | EXPERTS, {**ATTENTION, **HEAD_NORMS, **ROUTED}, more=_qwen3vl),
    "gpt-oss": Architecture(
        "gpt_oss", SIZES | expert_keys("num_local_experts", "intermediate_size"), {**ATTENTION, **_OSS}, more=_gpt_oss
    ),
    "granitemoe": Architecture(
        "granitemoeshared",
        SIZES | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        {**ATTENTION, **ROTARY, **_GRANITE},
        more=_granite,
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        SIZES | expert_keys("n_routed_experts") | {"attention.kv_lora_rank": "kv_lora_rank"},
        {**ATTENTION, **LATENT, **MLP, **ROUTED, **SHARED_EXPERTS, **BIAS},
        more=_deepseek,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        SIZES | expert_keys("n_routed_experts"),
        {**ATTENTION, **_NORMED, **HEAD_NORMS, **MLP, **ROUTED, **SHARED_EXPERTS, **BIAS},
        more=_sigmoid,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        SIZES | expert_keys("num_local_experts", "intermediate_size"),
        {**ATTENTION, **HEAD_NORMS, **ROUTED, "exp_probs_b.bias": "mlp.e_score_correction_bias"},
        more=_minimax,
    ),
    "olmoe": Architecture(
        "olmoe",
        SIZES | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        {**ATTENTION, **HEAD_NORMS, **ROUTED},
        more=_moe,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        SIZES | expert_keys("moe_num_experts") | {"expert_used_count": "moe_k"},
        {**ATTENTION, **MLP, **ROUTED, **SHARED_EXPERTS, **_ERNIE_BIAS},
        more=_ernie,
    ),
    "dots1": Architecture(
        "dots1",
        SIZES | expert_keys("n_routed_experts"),
        {**ATTENTION, **HEAD_NORMS, **MLP, **ROUTED, **SHARED_EXPERTS, **BIAS},
        more=_sigmoid,
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        SIZES | expert_keys("num_experts", "intermediate_size") | {"expert_used_count": "moe_topk"},
        {**ATTENTION, **ROUTED, **_HUNYUAN},
        more=_hunyuan,
    ),
    "phimoe": Architecture(
        "phimoe",
        SIZES | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        {**ATTENTION, **ROUTED, "ffn_gate_inp": "mlp.router"},
        more=_phi,
    ),
}
WITH_EXPERTS: dict[str, Architecture] = {
    "llama": Architecture(
        "mixtral",
        SIZES | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        {**ATTENTION, **ROTARY, **ROUTED},
        more=_moe,
    ),
}
"""Rows of names that stand for a dense model in files without experts."""
