"""Small random models of any class of transformers: its default or a published configuration, with sizes cut.

A cut adds no field. Layers are cut to the shortest prefix with every kind of layer, at least four. Token ids beyond the
cut vocabulary move inside. A default configuration also gets small widths; a published one keeps its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mmspec.targets.processor import Processor
from mmspec.targets.support import output_layer

VOCAB = 128
WORDS = 90
"""Token ids from here on are left to special tokens."""
_LAYERS = 4
_EXPERTS = r"(num|n)_(local_|routed_)?experts|(moe|ffn)_num_experts"
_ROUTING = rf"{_EXPERTS}|num_experts_per_tok(en)?|moe_(topk|k|top_k)|top_k_experts|n_group|topk_group|num_expert_group"
_DEPTH = r"(num_|n_)?(hidden_|encoder_|decoder_|global_|resampler_)?(layers?|depth)"
_SIZES = {
    64: r"(\w+_)?(hidden|embedding|model|emb)_(size|dim)|n_embd|d_model|dim|(\w+_)?embed_dim|(\w+_)?intermediate_size|"
    r"(\w+_)?(ffn|inner|mlp|ff)_(dim|size)|d_inner|n_inner|d_ff|dff|dim_ff|\w*ffn_hidden_size|lru_width|embed_dim_in|"
    r"projection_dim|projector_\w+_dim|vision_output_dim|(adapter_)?(out|output|in)_dim|word_embed_proj_dim|"
    r"share_expert_dim|merged_hidden_size",
    128: r"mamba_d_ssm",
    32: r"\w*expert\w*_intermediate_size|moe_intermediate_size|intermediate_size_mlp|\w+_rank|mamba_d_head",
    24: r"qk_head_dim",
    16: r"(?!qk_head_dim)(\w+_)?head_?dim|dim_head|d_head|kv_channels|(mamba_)?d_state|(ssm_)?state_size|index_topk",
    8: r"qk_rope_head_dim|rotary_dim|\w*sliding_window(_size)?|attention_chunk_size|(mamba_)?chunk_size|"
    r"local_attention|mamba_(n|num)_heads|n_mamba_heads|attention_window_size|hidden_size_per_layer_input",
    4: rf"{_DEPTH}|(?!index_)(\w+_)?(attention|key|n|num)_heads|(attention|n|num)_heads?|"
    rf"linear_num_(key|value)_heads|{_EXPERTS}",
    2: r"(\w+_)?(key_value|kv)_heads|num_experts_per_tok(en)?|moe_(topk|k|top_k)|num_experts_per_token|top_k_experts",
    1: r"n_groups?|topk_group|num_expert_group|first_k_dense_replace|mamba_n_groups|mamba_ngroups",
}
"""Names of sizes, by the size in a cut default configuration: 4 heads of 16 in 2 groups. The last matching
pattern counts.

An indexer keeps its heads: with few of them many of its scores are 0 in all heads, and top-k picks among equals. Doge
keeps its window, beyond which it picks among equals too."""
_VOCABULARY = re.compile(r"(\w+_)?vocab_size(_per_layer_input)?|n_words")
_TOKEN = re.compile(r"\w+_(token_(id|index)|id|token_ids|ids|token_idx)")
_RESERVED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SPREAD = 0.2  # standard deviation of small weights: layers change states by about their own size
_HYBRID = ["linear_attention", "hybrid"] * 2
_ZAMBA = dict(layers_block_type=_HYBRID, attention_hidden_size=128, attention_head_dim=32)
_SECTIONS = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]})
_PARTIAL = dict(partial_rotary_factor=0.5, mrope_section=[1, 1, 2])
_INCONSISTENT: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1]),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dory": dict(n_input_layers=1, n_recurrent_layers=2, n_output_layers=1),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "gemma3": dict(mm_tokens_per_image=16),
    "glm4v_text": _SECTIONS,
    "glm46v_text": _SECTIONS,
    "glm4v_moe_text": dict(rope_parameters={**_SECTIONS["rope_parameters"], **_PARTIAL}),
    "glm_ocr_text": _SECTIONS,
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=8),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"] * 2),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(head_dim=16),
    "hy_v4_vl_text": dict(rope_parameters={**_SECTIONS["rope_parameters"], "mrope_section": [2, 1, 1]}),
    "idefics3_vision": dict(patch_size=28),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "llama4_vision_model": dict(intermediate_size=256),
    "mamba2": dict(num_heads=8),
    "ministral": dict(head_dim=16),
    "mllama_vision_model": dict(vision_output_dim=128),
    "molmo2_adapter": dict(vision_feature_layer=[3, 2]),
    "muse_glimmer": dict(out_hidden_size=256),
    "muse_spark": dict(out_hidden_size=256),
    "nemotron": dict(num_key_value_heads=2),
    "paddleocr_vl_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_vl_text": _SECTIONS,
    "qwen4_exp_text": dict(eos_token_id=2),
    "shieldgemma2": dict(mm_tokens_per_image=16),
    "smolvlm_vision": dict(patch_size=28),
    "vipllava": dict(vision_feature_layers=[-2, -3, 1]),
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "mamba_headdim": 16, "num_hidden_layers": 4},
}
"""By model type, fields that the cut of a default configuration leaves inconsistent."""


def small_config(config_class: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """A class's default configuration with sizes cut, and with ``changes`` of further fields. Raises ``TypeError``: the
    class has no such field."""
    default = config_class()
    if unknown := sorted(changes.keys() - vars(default).keys()):
        raise TypeError(f"{config_class.__name__} has no {', '.join(unknown)}")
    return config_class(**{**_merged(_parts(default), _changes(default, widths=True, tokens={})), **changes})


def published_config(file: Path) -> PreTrainedConfig:
    """A published configuration, with layers, experts and vocabulary cut and without quantisation. Raises
    ``ValueError``: transformers has no class for it."""
    data = json.loads(file.read_text())
    data.pop("quantization_config", None)
    data.pop("auto_map", None)
    names = [data.get("model_type"), *(data.get("architectures") or [])]
    if names[0] not in CONFIG_MAPPING or not all(hasattr(transformers, name) for name in names[1:]):
        raise ValueError(f"transformers has no class for {', '.join(map(str, names))}")
    config = CONFIG_MAPPING[names[0]].from_dict(data)
    whole = {**_parts(config), **data}  # older files list the text model's fields at the top level
    return type(config).from_dict(_merged(whole, _changes(config, widths=False, tokens={})))


def _parts(config: PreTrainedConfig) -> dict[str, Any]:
    return {name: part.to_dict() for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}


def random_model(config: PreTrainedConfig, auto_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A model in float32 whose greedy answers vary, and do not end early."""
    torch.manual_seed(0)
    model = auto_class.from_config(config, dtype=torch.float32).eval()
    if (head := output_layer(model)) is not None:
        head.weight.data.normal_(std=0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def number_processor(vocab: int) -> Processor:
    """Its text is the numbers of tokens."""
    words = WordLevel({str(token): token for token in range(vocab)}, unk_token="0")
    return Processor(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)))


def _merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**data, **changes}
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(data.get(name), dict) and "model_type" in value:
            merged[name] = _merged(data[name], value)
    return merged


def _changes(config: PreTrainedConfig, *, widths: bool, tokens: dict[int, int]) -> dict[str, Any]:
    """Changed fields of a cut configuration; sub-configurations are dictionaries. ``tokens`` maps the token ids that
    were moved so far, old to new."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    changes = _layer_changes(config, fields)
    equal = {"head_dim": 8, "num_key_value_heads": 4} if "qk_rope_head_dim" in fields else {}  # by definition of MLA
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            part = _changes(value, widths=widths, tokens=tokens)
            changes[name] = {"model_type": value.model_type, **part} if value.model_type else part
        elif _VOCABULARY.fullmatch(name) and isinstance(value, int) and value > VOCAB:
            changes[name] = VOCAB
        elif _TOKEN.fullmatch(name):
            changes |= {name: _moved(name, value, tokens)} if _moved(name, value, tokens) != value else {}
        elif name == "initializer_range" and widths:
            changes[name] = _SPREAD
        elif isinstance(value, list) and widths and name.endswith("_size") and _size(name):
            changes[name] = [min(size, _size(name)) for size in changes.get(name, value)]
        elif type(value) is int and name not in changes and (widths or re.fullmatch(_ROUTING, name)):
            size = equal.get(name) or _size(name)
            if size is not None and value > size:
                changes[name] = size
    if widths and (rope := fields.get("rope_parameters")) and "mrope_section" in rope:
        changes["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}  # half of 16 head dimensions
    if widths:
        changes |= _INCONSISTENT.get(config.model_type, {})
    if fields.get("tie_word_embeddings"):
        changes["tie_word_embeddings"] = False  # tied random weights repeat one token
    return changes


def _size(name: str) -> int | None:
    return next((size for size in reversed(_SIZES) if re.fullmatch(_SIZES[size], name)), None)


def _layer_changes(config: PreTrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Number of layers, and per-layer lists of a configuration."""
    name, count = next(((n, v) for n, v in fields.items() if re.fullmatch(_DEPTH, n) and type(v) is int), ("", 0))
    if not name:  # Nemotron-H has only a list of layers
        name, count = "layers_block_type", len(fields.get("layers_block_type") or ())
    derived = {attr: getattr(config, attr, None) for attr in ("layer_types", "layers_block_type")}
    by_layer = {n: list(v) for n, v in {**derived, **fields}.items() if isinstance(v, list | tuple) and len(v) == count}
    kinds = [[str(kind) for kind in row] for row in by_layer.values() if len(set(map(str, row))) <= _LAYERS]
    length = max([_LAYERS, *(max(map(row.index, row)) + 1 for row in kinds)])
    changes: dict[str, Any] = {}
    if fields.get("num_kv_shared_layers"):
        length, changes["num_kv_shared_layers"] = 2 * length, length
    if count <= length:
        return {}
    for n, value in {**fields, "per_layer_config": config.to_dict().get("per_layer_config")}.items():
        if n in by_layer:
            changes[n] = by_layer[n][:length]
        elif isinstance(value, list) and re.fullmatch(r"\w*(indices|indexes|layer_ids|idxs|_layers?)", n):
            if all(type(i) is int for i in value):
                changes[n] = [i for i in value if i < length] or [length - 1]
        elif isinstance(value, dict) and value and all(str(layer).isdigit() for layer in value):
            changes[n] = {layer: setting for layer, setting in value.items() if int(layer) < length}
        elif re.fullmatch(_DEPTH, n) and value == count:
            changes[n] = length
    return changes


def _moved(name: str, value: Any, tokens: dict[int, int]) -> Any:
    """Remap a token id or a list of token ids into the cut vocabulary."""
    if isinstance(value, list):
        return [_moved(name, entry, tokens) for entry in value]
    if type(value) is not int or value < VOCAB:
        return value
    return tokens.setdefault(value, _RESERVED.get(name, VOCAB - 1 - len(tokens)))
