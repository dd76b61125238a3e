"""Tiny configurations of every supported architecture, by name: text, recurrent, hybrid and vision models."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

VOCAB = 101
IMAGE, VIDEO, VISION_START, VISION_END = 96, 97, 98, 99
TINY_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=512,
    initializer_range=0.25,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)


def _shrink(config_class: Any, **changes: Any) -> Any:
    """A class's default configuration with tiny sizes.

    Args:
        changes: values of other fields.

    Raises:
        TypeError: the class has no such field.
    """
    known = vars(config_class()).keys() | config_class.attribute_map.keys()
    if unknown := sorted(changes.keys() - known):
        raise TypeError(f"{config_class.__name__} must have all changed fields: it lacks {', '.join(unknown)}")
    return config_class(**{name: value for name, value in (TINY_SIZES | changes).items() if name in known})


TEXT_CONFIGS: dict[str, Any] = {
    "llama": lambda: _shrink(transformers.LlamaConfig),
    "mistral": lambda: _shrink(transformers.MistralConfig, sliding_window=None),
    "mistral-window": lambda: _shrink(transformers.MistralConfig, sliding_window=5),
    "qwen2": lambda: _shrink(transformers.Qwen2Config),
    "qwen2-window": lambda: _shrink(
        transformers.Qwen2Config, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: _shrink(transformers.Qwen3Config),
    "gemma": lambda: _shrink(transformers.GemmaConfig),
    "gemma2": lambda: _shrink(transformers.Gemma2Config, sliding_window=6, query_pre_attn_scalar=12),
    "gemma3": lambda: _shrink(transformers.Gemma3TextConfig, sliding_window=6, query_pre_attn_scalar=12),
    "doge": lambda: _shrink(transformers.DogeConfig),
    "dory": lambda: _dory(),
    "gpt_neo": lambda: _shrink(transformers.GPTNeoConfig, attention_types=[[["global", "local"], 1]], window_size=6),
}
if not hasattr(transformers, "DoryConfig"):  # added after transformers 5.23
    del TEXT_CONFIGS["dory"]


def _dory(**changes: Any) -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    layers = dict(num_hidden_layers=4, n_input_layers=1, n_recurrent_layers=2, n_output_layers=1, layer_types=kinds)
    return _shrink(transformers.DoryConfig, **layers, sliding_window=6, n_recurrent_loops=3, **changes)


_RECURRENT, _ATTENDING, _BOTH = "linear_attention", "full_attention", "hybrid"
_MIXER: dict[str, Any] = dict(
    mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=8
)


def _bamba(**changes: Any) -> transformers.BambaConfig:
    return _shrink(
        transformers.BambaConfig, **{**_MIXER, "num_hidden_layers": 5, "attn_layer_indices": [1, 4], **changes}
    )


_DELTA: dict[str, Any] = dict(
    num_hidden_layers=4,
    # With larger weights, transformers' prefill and token-by-token decoding were measured to differ by 6e-4.
    initializer_range=0.05,
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
_EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
)


def _qwen3_5(config_class: Any, **changes: Any) -> Any:
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[1, 1, 1])
    return _shrink(config_class, **_DELTA, rope_parameters=rope, **changes)


GATED_DELTA_CONFIGS: dict[str, Any] = {
    "qwen3_next": lambda: _shrink(transformers.Qwen3NextConfig, **_DELTA, **_EXPERTS),
    "qwen3_5_text": lambda: _qwen3_5(transformers.Qwen3_5TextConfig),
    "qwen3_5_moe_text": lambda: _qwen3_5(transformers.Qwen3_5MoeTextConfig, **_EXPERTS),
    "olmo_hybrid": lambda: _shrink(transformers.OlmoHybridConfig, num_hidden_layers=4),
}
"""Models with Gated DeltaNet layers: with fewer keys than values per layer, and as many (OLMo-Hybrid)."""

_LATENT: dict[str, Any] = dict(
    num_hidden_layers=4,
    initializer_range=0.05,  # as above
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=32,
)
KIMI_DELTA_CONFIGS: dict[str, Any] = {
    "kimi_linear": lambda: _shrink(
        transformers.KimiLinearConfig,
        **_LATENT,
        linear_head_dim=12,
        linear_num_heads=3,
        layer_types=[_RECURRENT, _RECURRENT, _ATTENDING, _RECURRENT],
    ),
    "bailing_hybrid": lambda: _shrink(
        transformers.BailingHybridConfig, **_LATENT, num_expert_group=1, topk_group=1, layer_group_size=3
    ),
}
"""Models with Kimi Delta Attention beside latent attention: without rotary positions, and with (Bailing)."""
if not hasattr(transformers, "BailingHybridConfig"):  # added in transformers 5.20
    del KIMI_DELTA_CONFIGS["bailing_hybrid"]


def _inkling(config_class: Any, **changes: Any) -> Any:
    return _shrink(
        config_class,
        num_hidden_layers=4,
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        sliding_window_size=6,
        rel_extent=9,
        swa_num_attention_heads=6,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        d_rel=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **changes,
    )


CONVOLUTION_CONFIGS: dict[str, Any] = {
    "lfm2": lambda: _shrink(transformers.Lfm2Config, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": lambda: _shrink(
        transformers.Lfm2MoeConfig,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "lfm3": lambda: _shrink(
        transformers.Lfm3Config,
        num_hidden_layers=4,
        layer_types=["conv", "sliding_attention", "conv", "full_attention"],
        sliding_window=6,
    ),
    "inkling_text": lambda: _inkling(transformers.InklingTextConfig, logits_mup_width_multiplier=1.5),
    "inkling2_text": lambda: _inkling(
        transformers.Inkling2TextConfig, n_layers_per_attn_res_block=3, unpadded_vocab_size=VOCAB
    ),
    "zaya": lambda: _shrink(
        transformers.ZayaConfig,
        num_hidden_layers=4,
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        sliding_window=6,
        initializer_range=0.6,  # with smaller weights, answers repeat one token
        num_experts=4,
        moe_intermediate_size=32,
        router_hidden_size=16,
    ),
}
"""Models with short convolutions as the only other layers, beside attention in one layer (Inkling), or in its
projections (ZAYA)."""
for _name, _config in {"lfm3": "Lfm3Config", "inkling2_text": "Inkling2TextConfig"}.items():
    if not hasattr(transformers, _config):  # added after transformers 5.21
        del CONVOLUTION_CONFIGS[_name]

SELECTIVE_CONFIGS: dict[str, Any] = {
    "mamba": lambda: _shrink(transformers.MambaConfig, num_hidden_layers=3, state_size=8),
    "falcon_mamba": lambda: _shrink(transformers.FalconMambaConfig, num_hidden_layers=3, state_size=8),
    "jamba": lambda: _shrink(
        transformers.JambaConfig,
        num_hidden_layers=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
    ),
    "zamba": lambda: _shrink(
        transformers.ZambaConfig,
        num_hidden_layers=4,
        layers_block_type=[_RECURRENT, _BOTH] * 2,
        # As for Zamba2.
        head_dim=24,
        initializer_range=0.1,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
}
"""Models with Mamba-1 layers: alone, with norms of B, C and step sizes, alternating with attention layers, and with
several scans each, before shared attention (Zamba)."""

MIXER_CONFIGS: dict[str, Any] = {
    # Each token goes to both experts: in bfloat16, experts were measured to differ between two plain passes.
    "minimax": lambda: _shrink(
        transformers.MiniMaxConfig, num_hidden_layers=4, block_size=4, num_local_experts=2, initializer_range=0.15
    ),
    "recurrent_gemma": lambda: _shrink(
        transformers.RecurrentGemmaConfig, num_hidden_layers=4, attention_window_size=6, w_init_variance_scale=1.0
    ),
}
"""Models whose mixers compute their recurrence themselves: lightning attention and RG-LRU."""
REFUSED: set[str] = set()
"""Models that mmspec refuses with the installed transformers."""
if "layer_types" not in transformers.RecurrentGemmaConfig.attribute_map:  # transformers 5.21 names its layers otherwise
    del MIXER_CONFIGS["recurrent_gemma"]
    REFUSED.add("recurrent_gemma")

HYBRID_CONFIGS: dict[str, Any] = {
    **SELECTIVE_CONFIGS,
    **MIXER_CONFIGS,
    **GATED_DELTA_CONFIGS,
    **KIMI_DELTA_CONFIGS,
    **CONVOLUTION_CONFIGS,
    "mamba2": lambda: _shrink(
        transformers.Mamba2Config, num_hidden_layers=3, head_dim=16, num_heads=6, n_groups=2, state_size=8, chunk_size=8
    ),
    "bamba": _bamba,
    # transformers clamps step sizes to these limits in prefill only, not in token-by-token decoding.
    "bamba-limits": lambda: _bamba(time_step_limit=(0.4, 1.0)),
    "zamba2": lambda: _shrink(
        transformers.Zamba2Config,
        num_hidden_layers=5,
        # Attention reads states and embeddings concatenated; its adapters are as wide for keys as for queries.
        head_dim=24,
        num_key_value_heads=4,
        # With larger weights, transformers' prefill and token-by-token decoding were measured to differ by 1e-3.
        initializer_range=0.1,
        layers_block_type=[_RECURRENT, _BOTH, _BOTH, _RECURRENT, _BOTH],
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        adapter_rank=4,
        use_mem_rope=True,
        n_mamba_heads=6,
        mamba_ngroups=2,
        mamba_d_state=8,
        chunk_size=8,
        time_step_min=1e-9,
    ),
    "nemotron_h": lambda: _shrink(
        transformers.NemotronHConfig,
        layers_block_type=[_RECURRENT, _ATTENDING, "mlp", _RECURRENT, "moe", _ATTENDING],
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=8,
        time_step_min=1e-9,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "falcon_h1": lambda: _shrink(
        transformers.FalconH1Config,
        num_hidden_layers=3,
        **{**_MIXER, "mamba_n_groups": 1, "mamba_n_heads": 4},
        mamba_d_ssm=64,
        lm_head_multiplier=0.7,
        embedding_multiplier=1.3,
        key_multiplier=0.8,
        ssm_in_multiplier=1.2,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
    ),
    "falcon_h1-norm": lambda: _shrink(
        transformers.FalconH1Config,
        **{**_MIXER, "mamba_n_heads": 4},
        mamba_d_ssm=64,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
    ),
    "granitemoehybrid": lambda: _shrink(
        transformers.GraniteMoeHybridConfig,
        num_hidden_layers=4,
        **{**_MIXER, "mamba_n_groups": 1},
        layer_types=[_RECURRENT, _ATTENDING, _RECURRENT, _ATTENDING],
        num_local_experts=4,
        shared_intermediate_size=32,
        position_embedding_type="rope",
        logits_scaling=1.5,
        residual_multiplier=0.8,
        attention_multiplier=0.3,
        embedding_multiplier=1.2,
    ),
}
"""All models with recurrent layers. Those of Mamba-2: alone, alternating with attention layers, before shared
attention (Zamba2), and in one layer with attention (Falcon-H1); with one and two groups."""
if FalconH1RMSNormGated(4)(torch.zeros(2, 1, 4)).ndim < 3:
    del HYBRID_CONFIGS["falcon_h1-norm"]  # transformers 5.21 loses an axis there, and decodes no batches


def _tower(config_class: Any = transformers.CLIPVisionConfig) -> Any:
    return config_class(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )


def _qwen_text(config_class: Any) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
    return _shrink(config_class, rope_parameters=rope)


_QWEN_VISION: dict[str, Any] = dict(
    depth=2, hidden_size=32, out_hidden_size=48, num_heads=2, patch_size=4, intermediate_size=32
)


def _qwen_vl(config_class: Any, text: Any, vision: dict[str, Any]) -> Any:
    tokens = dict(image_token_id=IMAGE, video_token_id=VIDEO)
    tokens |= dict(vision_start_token_id=VISION_START, vision_end_token_id=VISION_END)
    return config_class(text_config=text, vision_config=vision, **tokens)


VISION_CONFIGS: dict[str, Any] = {
    "llava": lambda: transformers.LlavaConfig(
        vision_config=_tower(),
        text_config=_shrink(transformers.LlamaConfig),
        image_token_index=IMAGE,
        image_seq_length=16,
    ),
    "llava_bamba": lambda: transformers.LlavaConfig(
        vision_config=_tower(), text_config=_bamba(), image_token_index=IMAGE, image_seq_length=16
    ),
    "llava_next": lambda: transformers.LlavaNextConfig(
        vision_config=_tower(),
        text_config=_shrink(transformers.MistralConfig, sliding_window=None),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    ),
    "llava_next_video": lambda: transformers.LlavaNextVideoConfig(
        vision_config=_tower(),
        text_config=_shrink(transformers.LlamaConfig),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    ),
    "llava_onevision": lambda: transformers.LlavaOnevisionConfig(
        vision_config=_tower(transformers.SiglipVisionConfig),
        text_config=_shrink(transformers.Qwen2Config),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[16, 32], [32, 16]],
        vision_feature_layer=-1,
    ),
    "qwen2_vl": lambda: _qwen_vl(
        transformers.Qwen2VLConfig,
        _qwen_text(transformers.Qwen2VLTextConfig),
        dict(depth=2, embed_dim=32, hidden_size=48, num_heads=2, patch_size=4, mlp_ratio=2),
    ),
    "qwen2_5_vl": lambda: _qwen_vl(
        transformers.Qwen2_5_VLConfig,
        _qwen_text(transformers.Qwen2_5_VLTextConfig),
        _QWEN_VISION | dict(window_size=16, fullatt_block_indexes=[1]),
    ),
    "qwen3_vl": lambda: _qwen_vl(
        transformers.Qwen3VLConfig,
        _qwen_text(transformers.Qwen3VLTextConfig),
        _QWEN_VISION | dict(depth=3, deepstack_visual_indexes=[0, 1], num_position_embeddings=16),
    ),
    "qwen3_5": lambda: _qwen_vl(
        transformers.Qwen3_5Config,
        _qwen3_5(transformers.Qwen3_5TextConfig),
        _QWEN_VISION | dict(num_position_embeddings=16),
    ),
}
