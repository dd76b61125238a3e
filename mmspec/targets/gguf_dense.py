"""Architectures of llama.cpp with dense layers of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.targets.gguf_keys import (
    ATTENTION,
    HEAD_NORMS,
    HUNYUAN_NORMS,
    MLP,
    OUTER,
    ROTARY,
    SIZES,
    Architecture,
    Keys,
    Names,
    Rows,
    decoder,
    granite,
    norms_plus_one,
    rope,
    sliding,
    without,
)

_RMS = "attention.layer_norm_rms_epsilon"
_LAST_NORMS: Names = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_POST_NORMED: Names = {**without(ATTENTION, "attn_norm", "ffn_norm"), **HEAD_NORMS, **MLP, **_LAST_NORMS}


def _sizes(epsilon: str) -> dict[str, str]:
    """``SIZES`` of models with layer norms; ``epsilon`` is their field."""
    return without(SIZES, _RMS) | {"attention.layer_norm_epsilon": epsilon}


def _glm4(keys: Keys) -> dict[str, Any]:
    found, sections = decoder(keys), keys("rope.dimension_sections", None)
    if sections is not None:  # of a model for images
        found["rope_parameters"]["mrope_section"] = [size for size in sections if size]
    return found


def _interleaved(heads: str) -> Rows:
    """Undoes llama.cpp's order of rows in models for images: a pair's rows are half the turned rows apart there."""

    def order(config: Any, rows: int) -> Tensor:
        size = rows // getattr(config, heads)
        turned = int(size * config.rope_parameters["partial_rotary_factor"])
        pairs = torch.arange(turned)
        if "mrope_section" in config.rope_parameters:
            pairs = pairs.view(2, -1).t().flatten()
        return (torch.arange(0, rows, size)[:, None] + torch.cat([pairs, torch.arange(turned, size)])).flatten()

    return Rows(order)


def _mistral(keys: Keys) -> dict[str, Any]:
    found, scale = decoder(keys) | {"sliding_window": None}, keys("attention.temperature_scale", 0.0)
    if over := keys("rope.scaling.yarn_log_multiplier", 0.0):
        found["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": over}
    if not scale:
        return found | {"model_type": "mistral"}
    found["rope_parameters"].setdefault("original_max_position_embeddings", keys("context_length"))
    found["rope_parameters"]["llama_4_scaling_beta"] = scale
    return found


def _olmo(keys: Keys) -> dict[str, Any]:
    if not 0.99e-5 < keys("attention.layer_norm_epsilon") < 1.01e-5:
        raise ValueError("expected attention.layer_norm_epsilon 1e-5 of OLMo models")
    return decoder(keys) | {"clip_qkv": keys("attention.clamp_kqv", 0.0) or None}


def _olmo2(keys: Keys) -> dict[str, Any]:
    found = decoder(keys)
    if not keys("attention.sliding_window", 0):
        return found
    local = {"rope_type": "default", "rope_theta": keys("rope.freq_base_swa", found["rope_parameters"]["rope_theta"])}
    found["rope_parameters"] = {"full_attention": found["rope_parameters"], "sliding_attention": local}
    return found | sliding(keys, 4) | {"model_type": "olmo3"}


def _minicpm(keys: Keys) -> dict[str, Any]:
    found, width = decoder(keys), keys("embedding_length")
    return found | {
        "attention_multiplier": found["head_dim"] ** -0.5,
        "embedding_multiplier": keys("embedding_scale", 12.0),
        "residual_multiplier": keys("residual_scale", 1.4 * keys("block_count") ** -0.5),
        "logits_scaling": keys("logit_scale", width / 256),
    }


def _exaone(keys: Keys) -> dict[str, Any]:
    """Only models of 64 layers have windows by default."""
    layers = keys("block_count")
    if "attention.sliding_window" in keys or layers == 64:
        return decoder(keys) | sliding(keys, 4, 4096)
    return decoder(keys) | {"sliding_window": None, "layer_types": ["full_attention"] * layers}


def _cohere(keys: Keys) -> dict[str, Any]:
    """Without a scale, logits are not scaled."""
    return decoder(keys) | {"logit_scale": keys("logit_scale", 0.0) or 1.0}


def _phi3(keys: Keys) -> dict[str, Any]:
    found = decoder(keys) | {"sliding_window": keys("attention.sliding_window", 0) or None}
    original = found["rope_parameters"].get("original_max_position_embeddings", keys("context_length"))
    return found | {"original_max_position_embeddings": original}


def _stablelm(keys: Keys) -> dict[str, Any]:
    return decoder(keys) | {"use_parallel_residual": "blk.0.ffn_norm.weight" not in keys.tensors}


def _nemotron(keys: Keys) -> dict[str, Any]:
    keys(_RMS, None)  # some converters write it too
    return decoder(keys)


# Gemma: the scale of attention is not stored.

_PLAIN: Names = {**ATTENTION, **MLP}
_FOUR_NORMS: Names = {**_PLAIN, **_LAST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_GEMMA_OUTER = norms_plus_one(OUTER)


def _scaled(keys: Keys, largest: int) -> dict[str, Any]:
    """``decoder`` with the scale of attention; the largest model, by its layers, has another."""
    found, width = decoder(keys), keys("embedding_length") // keys.uniform("attention.head_count")
    return found | {"query_pre_attn_scalar": width if keys("block_count") == largest else found["head_dim"]}


def _gemma2(keys: Keys) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _scaled(keys, 46) | sliding(keys, 2, 4096) | {name: keys(name, usual) for name, usual in caps.items()}


def _gemma3(keys: Keys) -> dict[str, Any]:
    found = _scaled(keys, 62) | {"final_logit_softcapping": keys("final_logit_softcapping", 0.0) or None}
    local = {"rope_type": "default", "rope_theta": keys("rope.freq_base_swa", 10_000.0)}
    found["rope_parameters"] = {"full_attention": found["rope_parameters"], "sliding_attention": local}
    kinds = sliding(keys, 6, 0)
    kinds["sliding_window"] = kinds["sliding_window"] or keys("context_length")  # transformers makes a mask of it
    return found | kinds


_GEMMA4: Names = {
    **_FOUR_NORMS,
    **HEAD_NORMS,
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA4_OUTER: Names = {
    **OUTER,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def _gemma4(keys: Keys) -> dict[str, Any]:
    found = sliding(keys)
    kinds, layers, width = found["layer_types"], keys("block_count"), keys("attention.key_length")
    shared = keys("attention.shared_kv_layers", 0)
    inner, heads = keys.by_layer("feed_forward_length"), keys.by_layer("attention.head_count_kv")
    of_kind = {kind: {count for count, one in zip(heads, kinds, strict=True) if one == kind} for kind in kinds}
    wide = inner != inner[:1] * layers
    if any(len(counts) > 1 for counts in of_kind.values()) or (
        wide and inner != [inner[0]] * (layers - shared) + [2 * inner[0]] * shared
    ):
        raise ValueError("expected one number of key heads for each kind of layer, and one or twice one width")
    keys.expect("attention.value_length", width)
    keys.expect("attention.value_length_swa", local := keys("attention.key_length_swa"))
    keys.expect("rope.dimension_count", width)
    keys.expect("rope.dimension_count_swa", local)
    factors = keys.tensors["rope_freqs.weight"][...]
    turned = int((factors == 1).sum())
    if not ((factors[:turned] == 1).all() and (factors[turned:] > 1e20).all()):
        raise ValueError("expected rope_freqs.weight of ones and, for features that do not turn, infinity")
    full = {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}
    full["rope_theta"] = keys("rope.freq_base", 10_000.0)
    by_layer = keys("embedding_length_per_layer_input", 0)
    global_layers = [layer for layer in range(layers - shared) if kinds[layer] == "full_attention"]
    return found | {
        "head_dim": local,
        "global_head_dim": width,
        "num_key_value_heads": min(of_kind.get("sliding_attention", of_kind.get("full_attention", {0}))),
        "num_global_key_value_heads": min(of_kind.get("full_attention", {0})),
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in keys.tensors for layer in global_layers),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": keys("rope.freq_base_swa", 10_000.0)},
        },
        "intermediate_size": inner[0],
        "use_double_wide_mlp": wide,
        "enable_moe_block": keys("expert_count", 0) > 0,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": by_layer,
        "vocab_size_per_layer_input": keys.tensors["per_layer_token_embd.weight"].shape[0] if by_layer else 1,
        "final_logit_softcapping": keys("final_logit_softcapping", 0.0) or None,
    }


# Older models, whose layers have names of their own.


def _transposed(config: Any, weight: Tensor) -> Tensor:
    return weight.t()


def _grouped(config: Any, rows: int) -> Tensor:
    """Falcon: rows of queries, key and value by key head; in files, all queries, all keys, all values."""
    groups, size = (config.num_kv_heads, config.head_dim) if config.new_decoder_architecture else (1, config.head_dim)
    number = torch.arange(rows)
    queries, keys, values = number.split([rows - 2 * groups * size, groups * size, groups * size])
    return torch.cat([part.view(groups, -1) for part in (queries, keys, values)], 1).flatten()


def _by_head(config: Any, rows: int) -> Tensor:
    """BLOOM: rows of query, key and value by head; in files, all queries, all keys, all values."""
    return torch.arange(rows).view(3, config.n_head, -1).transpose(0, 1).flatten()


def _falcon(keys: Keys) -> dict[str, Any]:
    two, groups = "blk.0.attn_norm_2.weight" in keys.tensors, keys.uniform("attention.head_count_kv")
    return {
        "rope_parameters": rope(keys),
        "new_decoder_architecture": two or groups > 1,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "multi_query": True,
        "parallel_attn": True,
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    keys.expect("attention.head_count_kv", keys("attention.head_count"))
    return {}


def _bloom(keys: Keys) -> dict[str, Any]:
    keys.expect("feed_forward_length", 4 * keys("embedding_length"))
    return _gpt2(keys)


_OLD_OUTER: Names = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_OLD_LINEAR: Names = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_OLD_LINEAR["attn_output"] = "self_attention.dense"
_BLOOM: Names = {
    "attn_norm": "input_layernorm",
    "attn_qkv": ("self_attention.query_key_value", Rows(_by_head)),
    "ffn_norm": "post_attention_layernorm",
    **_OLD_LINEAR,
}
_FALCON: Names = {
    "attn_norm": "input_layernorm|ln_mlp",
    "attn_norm_2": "ln_attn",
    "attn_qkv": ("self_attention.query_key_value", Rows(_grouped)),
    **_OLD_LINEAR,
}
_GPT2: Names = {
    "attn_norm": "ln_1",
    "attn_qkv": ("attn.c_attn", _transposed),
    "attn_output": ("attn.c_proj", _transposed),
    "ffn_norm": "ln_2",
    "ffn_up": ("mlp.c_fc", _transposed),
    "ffn_down": ("mlp.c_proj", _transposed),
}
_GPT2_OUTER: Names = {**_OLD_OUTER, "token_embd": "transformer.wte", "position_embd": "transformer.wpe"}
_GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_BLOOM_KEYS = {
    "context_length": "seq_length",
    "embedding_length": "hidden_size",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_FALCON_KEYS = _sizes("layer_norm_epsilon") | {
    "feed_forward_length": "ffn_hidden_size",
    "attention.head_count_kv": "num_kv_heads",
}
_PHI2: Names = {**ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_GATE_UP: Names = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_PHI3: Names = {**without(ATTENTION, "attn_q", "attn_k", "attn_v"), **_GATE_UP, "attn_qkv": "self_attn.qkv_proj"}
_NEMOTRON = norms_plus_one(without(_PLAIN, "ffn_gate"))
_GLM4: Names = {
    **ATTENTION,
    "attn_q": ("self_attn.q_proj", _interleaved("num_attention_heads")),
    "attn_k": ("self_attn.k_proj", _interleaved("num_key_value_heads")),
    "post_attention_norm": "post_self_attn_layernorm",
    **_GATE_UP,
    "post_ffw_norm": "post_mlp_layernorm",
}
_NORMS: Names = {
    f"attn_{part}_norm.{head}": f"self_attn.{part}_layernorm.norms.{head}" for part in "qk" for head in range(128)
}
_TURNED: Names = {**ATTENTION, **ROTARY, **MLP}
_GEMMA4_KEYS = without(SIZES, "feed_forward_length", "attention.head_count_kv")

ARCHITECTURES: dict[str, Architecture] = {
    "bloom": Architecture(
        "bloom",
        _BLOOM_KEYS,
        _BLOOM,
        {**_OLD_OUTER, "token_embd_norm": "transformer.word_embeddings_layernorm"},
        _bloom,
        "transformer.h.{}",
    ),
    "cohere2": Architecture(
        "cohere2", _sizes("layer_norm_eps"), _PLAIN, more=lambda keys: _cohere(keys) | sliding(keys, 4)
    ),
    "command-r": Architecture("cohere", _sizes("layer_norm_eps"), {**_PLAIN, **HEAD_NORMS}, more=_cohere),
    "ernie4_5": Architecture("ernie4_5", SIZES, _PLAIN, more=decoder),
    "exaone4": Architecture("exaone4", SIZES, _POST_NORMED, more=_exaone),
    "falcon": Architecture("falcon", _FALCON_KEYS, _FALCON, _OLD_OUTER, _falcon, "transformer.h.{}"),
    "gemma": Architecture("gemma", SIZES, norms_plus_one(_PLAIN), _GEMMA_OUTER, decoder),
    "gemma2": Architecture("gemma2", SIZES, norms_plus_one(_FOUR_NORMS), _GEMMA_OUTER, _gemma2),
    "gemma3": Architecture("gemma3_text", SIZES, norms_plus_one(_FOUR_NORMS | HEAD_NORMS), _GEMMA_OUTER, _gemma3),
    "gemma4": Architecture("gemma4_text", _GEMMA4_KEYS, _GEMMA4, _GEMMA4_OUTER, _gemma4),
    "glm4": Architecture("glm4", SIZES, _GLM4, more=_glm4),
    "gpt2": Architecture("gpt2", _GPT2_KEYS, _GPT2, _GPT2_OUTER, _gpt2, "transformer.h.{}"),
    "granite": Architecture("granite", SIZES, _TURNED, more=granite),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", SIZES, {**_PLAIN, **HUNYUAN_NORMS}, more=decoder),
    **dict.fromkeys(("deci", "internlm2", "llama"), Architecture("llama", SIZES, _TURNED, more=decoder)),
    "minicpm": Architecture("granite", SIZES, _TURNED, more=_minicpm),
    "mistral3": Architecture("ministral3", SIZES, _TURNED, more=_mistral),
    "nemotron": Architecture("nemotron", _sizes("norm_eps"), _NEMOTRON, _GEMMA_OUTER, _nemotron),
    "olmo": Architecture("olmo", without(SIZES, _RMS), _TURNED, more=_olmo),
    "olmo2": Architecture("olmo2", SIZES, _POST_NORMED, more=_olmo2),
    "phi2": Architecture(
        "phi", _sizes("layer_norm_eps"), _PHI2, {**OUTER, "output_norm": "model.final_layernorm"}, decoder
    ),
    "phi3": Architecture("phi3", SIZES, _PHI3, more=_phi3),
    **dict.fromkeys(("qwen2", "qwen2vl"), Architecture("qwen2", SIZES, _PLAIN, more=decoder)),
    **dict.fromkeys(("qwen3", "qwen3vl"), Architecture("qwen3", SIZES, {**_PLAIN, **HEAD_NORMS}, more=decoder)),
    "seed_oss": Architecture(
        "seed_oss", SIZES, {**_PLAIN, "post_attention_norm": "post_attention_layernorm"}, more=decoder
    ),
    "smollm3": Architecture("smollm3", SIZES, _TURNED, more=decoder),
    "stablelm": Architecture("stablelm", _sizes("layer_norm_eps"), {**_PLAIN, **_NORMS}, more=_stablelm),
    "starcoder2": Architecture(
        "starcoder2",
        _sizes("norm_epsilon"),
        {**ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        more=lambda keys: decoder(keys) | {"sliding_window": None},
    ),
}
