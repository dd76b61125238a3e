"""Architectures of llama.cpp with recurrent layers, and hybrids of them and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.gguf_keys import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    OUTER,
    ROTARY,
    ROUTED,
    SHARED,
    SIZES,
    Architecture,
    Keys,
    Names,
    Rows,
    decoder,
    expert_keys,
    experts,
    flat,
    granite_scales,
    head_size,
    heads,
    log_of_negative,
    mlp,
    norms_plus_one,
    rope,
    without,
)
from mmspec.targets.gguf_mixtures import BIAS, LATENT, NORMED, SHARED_EXPERTS, SIGMOID


def _mamba2(place: str) -> Names:
    """Weights of a Mamba-2 mixer."""
    return {
        **{f"ssm_{name}": f"{place}.{name}_proj" for name in ("in", "out")},
        **{"ssm_conv1d": f"{place}.conv1d", "ssm_dt": f"{place}.dt_bias", "ssm_d": f"{place}.D"},
        **{"ssm_a": (f"{place}.A_log", log_of_negative), "ssm_norm": (f"{place}.norm", flat)},
    }


def _mamba(place: str) -> Names:
    """Weights of a Mamba-1 mixer, with the norms of Jamba."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_d": "D"}
    names |= {"ssm_out": "out_proj"} | {f"ssm_{name}_norm": f"{name}_layernorm" for name in ("dt", "b", "c")}
    return {key: f"{place}.{name}" for key, name in names.items()} | {"ssm_a": (f"{place}.A_log", log_of_negative)}


def _attends(keys: Keys) -> list[bool]:
    """Whether each layer has attention: where it has key heads."""
    return [heads > 0 for heads in keys("attention.head_count_kv", field="layer_types")]


def _mamba2_sizes(keys: Keys, heads: str = "mamba_n_heads", size: str = "mamba_d_head") -> dict[str, int]:
    """Heads and features of a head; ``ssm.time_step_rank`` is the number of heads."""
    count = keys("ssm.time_step_rank")
    return {heads: count, size: keys("ssm.inner_size") // count}


def _mamba2_fields(keys: Keys) -> dict[str, Any]:
    expand = keys("ssm.inner_size") // keys("embedding_length")
    return {**_mamba2_sizes(keys, "num_heads", "head_dim"), "expand": expand}


def _mamba_fields(keys: Keys) -> dict[str, Any]:
    fields = {"expand": keys("ssm.inner_size") // keys("embedding_length")}
    if not keys("ssm.dt_b_c_rms", False):
        return fields
    return fields | {"model_type": "falcon_mamba", "mixer_rms_eps": keys("attention.layer_norm_rms_epsilon")}


def _granite(keys: Keys) -> dict[str, Any]:
    kinds = ["attention" if attends else "mamba" for attends in _attends(keys)]
    positions = keys("rope.scaling.finetuned", True)  # the converter's mark of models with rotary embeddings
    experts = keys("expert_count", 0)
    width = keys("expert_shared_feed_forward_length", 0) or keys("feed_forward_length")
    return {
        "layer_types": kinds,
        "num_key_value_heads": max(keys("attention.head_count_kv")),
        **_mamba2_sizes(keys),
        "mamba_expand": keys("ssm.inner_size") // keys("embedding_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": keys("expert_used_count", 0),
        "shared_intermediate_size": width,
        "position_embedding_type": "rope" if positions else None,
        "rope_parameters": rope(keys),
        **granite_scales(keys, head_size(keys)),
    }


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    inner = keys("feed_forward_length", field="layers_block_type")
    mixture = "moe" if any(name.endswith("ffn_gate_inp.weight") for name in keys.tensors) else "mlp"
    attends = _attends(keys)
    kinds = [mixture if width else "attention" if one else "mamba" for width, one in zip(inner, attends, strict=True)]
    fields = {
        "layers_block_type": kinds,
        "num_key_value_heads": max(keys("attention.head_count_kv")),
        "head_dim": head_size(keys),
        **_mamba2_sizes(keys, "mamba_num_heads", "mamba_head_dim"),
        "intermediate_size": max(inner),
    }
    _ = heads(keys), rope(keys), keys("rope.scaling.finetuned", None)  # its attention has no positions
    keys("attention.layer_norm_epsilon", None)  # of another name for the same norm
    found = {field: keys(key, None) for key, field in _NEMOTRON_EXPERTS.items()}
    return fields | {field: value for field, value in found.items() if value is not None}


def _period(layers: list[int], kind: str) -> dict[str, int]:
    """Period and offset of layers, Jamba's fields."""
    period = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1_000_000
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": layers[0] % period}


def _jamba(keys: Keys) -> dict[str, Any]:
    routed = sorted(int(name.split(".")[1]) for name in keys.tensors if name.endswith("ffn_gate_inp.weight"))
    attends = [layer for layer, one in enumerate(_attends(keys)) if one]
    return {
        "num_key_value_heads": max(keys("attention.head_count_kv")),
        "mamba_expand": keys("ssm.inner_size") // keys("embedding_length"),
        **_period(attends, "attn"),
        **_period(routed, "expert"),
    }


def _value_heads(rows: bool, offset: Callable[[Any], int] = lambda config: 0) -> Callable[[Any, int], Tensor]:
    """Undoes llama.cpp's order of the value heads of Gated DeltaNet: the first of each key head, then the second.

    Args:
        rows: whether a head has ``linear_value_head_dim`` rows, not one.
        offset: rows before the rows of value heads.
    """

    def order(config: Any, count: int) -> Tensor:
        before, groups = offset(config), config.linear_num_key_heads
        size = config.linear_value_head_dim if rows else 1
        values = torch.arange(before, count).view(-1, groups, size).transpose(0, 1).flatten()
        return torch.cat([torch.arange(before), values])

    return order


def _query_key_rows(config: Any) -> int:
    return int(2 * config.linear_num_key_heads * config.linear_key_head_dim)


_DELTA: Names = {
    "attn_qkv": ("linear_attn.in_proj_qkv", Rows(_value_heads(True, _query_key_rows))),
    "attn_gate": ("linear_attn.in_proj_z", Rows(_value_heads(True))),
    "ssm_alpha": ("linear_attn.in_proj_a", Rows(_value_heads(False))),
    "ssm_beta": ("linear_attn.in_proj_b", Rows(_value_heads(False))),
    "ssm_conv1d": ("linear_attn.conv1d", Rows(_value_heads(True, _query_key_rows))),
    "ssm_dt": ("linear_attn.dt_bias", Rows(_value_heads(False))),
    "ssm_a": ("linear_attn.A_log", lambda config, weight: Rows(_value_heads(False))(config, (-weight).log())),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": ("linear_attn.out_proj", lambda config, weight: weight[:, _value_heads(True)(config, weight.shape[1])]),
}
_QWEN = norms_plus_one(ATTENTION | NORMED | HEAD_NORMS)
_QWEN_OUTER = norms_plus_one(OUTER)
_QWEN_KEYS = SIZES | {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_QWEN_EXPERTS = EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}


def _qwen_next(keys: Keys) -> dict[str, Any]:
    layers = keys("block_count") - keys("nextn_predict_layers", 0)
    interval = keys("full_attention_interval", 4)
    recurrent = keys("attention.recurrent_layers", [(layer + 1) % interval > 0 for layer in range(layers)])
    return decoder(keys) | {
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:layers]],
        "linear_value_head_dim": keys("ssm.inner_size") // keys("ssm.time_step_rank"),
        "norm_topk_prob": True,
    }


def _qwen35(keys: Keys) -> dict[str, Any]:
    fields = _qwen_next(keys)
    sections = [size for size in keys("rope.dimension_sections", [11, 11, 10, 0]) if size]
    fields["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    return fields


def _grouped(config: Any, rows: int) -> Tensor:
    """Order of rows of the queries, keys, values and gates of Gated DeltaNet in groups by key head."""
    groups, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // groups * config.linear_value_head_dim
    sizes = [groups * size for size in (key, key, value, value)]
    return torch.cat([part.view(groups, -1) for part in torch.arange(rows).split(sizes)], 1).flatten()


_NEXT: Names = {
    **{name: ("linear_attn.in_proj_qkvz", Rows(_grouped)) for name in ("attn_qkv", "attn_gate")},
    **{name: place for name, place in _mamba2("linear_attn").items() if name not in ("ssm_in", "ssm_d")},
    "ssm_ba": "linear_attn.in_proj_ba",
}

_LFM: Names = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.out_proj",
    **{f"attn_{name}_norm": f"self_attn.{name}_layernorm" for name in "qk"},
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "out_proj", "conv")},
}
_LFM_OUTER: Names = OUTER | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}


def _lfm2(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", SIGMOID)
    return {
        "num_key_value_heads": max(keys("attention.head_count_kv")),
        "layer_types": ["full_attention" if attends else "conv" for attends in _attends(keys)],
        "rope_parameters": rope(keys),
        "block_auto_adjust_ff_dim": False,
    }


_LFM_KEYS = SIZES | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}


def _kimi(keys: Keys) -> dict[str, Any]:
    for key in ("rope.freq_base", "attention.key_length", "attention.value_length"):
        keys(key, None)  # its attention has no positions; sizes of keys and values in a cache of latents
    keys.expect("expert_gating_func", SIGMOID)
    keys.expect("expert_weights_norm", True)
    layers, dense = keys("block_count"), keys("leading_dense_block_count", 0)
    rotated = keys("rope.dimension_count")
    return {
        "num_key_value_heads": keys("attention.head_count"),
        "linear_num_heads": keys("attention.head_count"),
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in _attends(keys)],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "q_lora_rank": keys("attention.q_lora_rank", None),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys("attention.key_length_mla") - rotated,
        "routed_scaling_factor": keys("expert_weights_scale", 0.0) or 1.0,
    }


def _convolutions(config: Any, *tensors: Tensor) -> Tensor:
    return torch.cat([tensor.flatten(0, -2) for tensor in tensors])


_KIMI: Names = {
    **{f"ssm_conv1d_{name}": ("self_attn.conv1d", _convolutions) for name in "qkv"},
    **{f"ssm_f_{name}": f"self_attn.forget_gate.f_{name}_proj" for name in "ab"},
    **{f"ssm_g_{name}": f"self_attn.g_{name}_proj" for name in "ab"},
    "ssm_dt": "self_attn.forget_gate.dt_bias",
    "ssm_a": ("self_attn.forget_gate.A_log", log_of_negative),
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}

_HYBRID = without(SIZES, "attention.head_count_kv", "feed_forward_length")
_SSM = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups"}
_MAMBA = {
    **{"embedding_length": "hidden_size", "attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    **{"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size"},
}
_MAMBA_OUTER: Names = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}

_NEMOTRON_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "moe_latent_size": "moe_latent_size",
}
_NEMOTRON = Architecture(
    "nemotron_h",
    _HYBRID
    | {
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
    },
    {
        "attn_norm": "norm",
        **_mamba2("mixer"),
        **{f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"},
        "attn_output": "mixer.o_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b": "mixer.gate.e_score_correction_bias",
        **{f"ffn_{name}": f"mixer.{name}_proj" for name in ("up", "down")},
        **{f"ffn_{name}_exps": f"mixer.experts.{name}_proj" for name in ("up", "down")},
        **{f"ffn_{name}_shexp": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
    },
    {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
    _nemotron_h,
)

ARCHITECTURES: dict[str, Architecture] = {
    "mamba": Architecture(
        "mamba",
        {**_MAMBA, "ssm.time_step_rank": "time_step_rank"},
        {"attn_norm": "norm", **_mamba("mixer")},
        _MAMBA_OUTER,
        _mamba_fields,
        "backbone.layers.{}",
    ),
    "mamba2": Architecture(
        "mamba2",
        {**_MAMBA, "ssm.group_count": "n_groups"},
        {"attn_norm": "norm", **_mamba2("mixer")},
        _MAMBA_OUTER,
        _mamba2_fields,
        "backbone.layers.{}",
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _HYBRID | {"feed_forward_length": "intermediate_size", **_SSM},
        ATTENTION
        | ROTARY
        | _mamba2("mamba")
        | {
            **{f"ffn_{name}": ("shared_mlp.input_linear", Rows()) for name in ("gate", "up", "gate_shexp", "up_shexp")},
            **{f"ffn_{name}": "shared_mlp.output_linear" for name in ("down", "down_shexp")},
            "ffn_gate_inp": "block_sparse_moe.router",
            **experts("block_sparse_moe.experts"),
        },
        more=_granite,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        SIZES | {**_SSM, "ssm.inner_size": "mamba_d_ssm"},
        ATTENTION | _mamba2("mamba") | {"ffn_norm": "pre_ff_layernorm"} | mlp("feed_forward"),
        OUTER | {"output_norm": "model.final_layernorm"},
        lambda keys: decoder(keys) | _mamba2_sizes(keys) | {"mamba_norm_before_gate": False},
    ),
    "qwen3next": Architecture(
        "qwen3_next", _QWEN_KEYS | _QWEN_EXPERTS, _QWEN | _NEXT | ROUTED | SHARED, _QWEN_OUTER, _qwen_next
    ),
    "qwen35": Architecture("qwen3_5_text", _QWEN_KEYS, _QWEN | _DELTA | MLP, _QWEN_OUTER, _qwen35),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        without(_QWEN_KEYS, "feed_forward_length") | _QWEN_EXPERTS,
        _QWEN | _DELTA | ROUTED | SHARED,
        _QWEN_OUTER,
        _qwen35,
    ),
    "lfm2": Architecture("lfm2", without(_LFM_KEYS, "attention.head_count_kv"), _LFM, _LFM_OUTER, _lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe",
        without(_LFM_KEYS, "attention.head_count_kv") | EXPERTS | {"leading_dense_block_count": "num_dense_layers"},
        _LFM
        | {
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b": "feed_forward.expert_bias",
            **experts("feed_forward.experts"),
        },
        _LFM_OUTER,
        _lfm2,
    ),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
    "jamba": Architecture(
        "jamba",
        _HYBRID
        | {
            "feed_forward_length": "intermediate_size",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
        },
        ATTENTION
        | _mamba("mamba")
        | {
            "ffn_norm": "pre_ff_layernorm",
            **mlp("feed_forward"),
            "ffn_gate_inp": "feed_forward.router",
            **experts("feed_forward.experts"),
        },
        OUTER | {"output_norm": "model.final_layernorm"},
        _jamba,
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        without(SIZES, "attention.head_count_kv")
        | expert_keys("num_local_experts")
        | {
            "expert_shared_count": "n_shared_experts",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.value_length_mla": "v_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "kda.head_dim": "linear_head_dim",
        },
        ATTENTION | LATENT | _KIMI | MLP | ROUTED | SHARED_EXPERTS | BIAS,
        more=_kimi,
    ),
}
