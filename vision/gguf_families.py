"""Types of projectors in GGUF files (``clip.projector_type``), and what transformers calls their parts.

Sources: llama.cpp's ``conversion/`` (keys, order and values of weights), ``tools/mtmd/clip.cpp`` (what each key means)
and ``gguf-py/gguf/tensor_mapping.py``. Values that files lack come from published configurations of the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.gguf_keys import ANY, Architecture, Names, Rows, minus_one, mlp, rotary

_UNREAD = ("projector_type", "vision.projector_type", "has_llava_projector", "has_audio_encoder")
_SIZED = ("vision.projection_dim", "vision.feed_forward_length")  # tensors have them
_OLD = tuple(f"vision.{name}" for name in ("mm_projector_type", "image_aspect_ratio", "image_crop_resolution"))
HARMLESS: Mapping[str, Any] = {
    **dict.fromkeys((*_UNREAD, *_SIZED, *_OLD, "vision.image_split_resolution"), ANY),
    **{"has_vision_encoder": True, "has_text_encoder": False, "minicpmv_version": 0},
}
"""Keys that change nothing, at any value or at the given value."""

_TOWER, _PROJECTOR, _VISUAL = "model.vision_tower", "model.multi_modal_projector", "model.visual"
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES = {
    "vision.embedding_length": "hidden_size",
    "vision.block_count": "num_hidden_layers",
    "vision.attention.head_count": "num_attention_heads",
    "vision.image_size": "image_size",
    "vision.patch_size": "patch_size",
    "vision.attention.layer_norm_epsilon": "layer_norm_eps",
}


@dataclass(frozen=True, kw_only=True)
class Family(Architecture):
    """How a type of projector is read. Functions take the ``Projector``.

    Attributes:
        keys: fields of the vision tower's configuration by key.
        listed: names outside of blocks that depend on the file.
        output: tensor and axis that have the language model's hidden size.
        vision, more: further fields of configurations, of the vision tower and the model.
        models: model types by the language model's architecture, if there are several.
        text: changed fields of the language model's configuration, which is the second argument.
        tokens, special: candidate tokens by field of the model's configuration, and by name of the tokenizer's special
            tokens; the first token in the vocabulary is used.
        media: class and options of transformers' processor; options of its parts by class.
        image: candidate image tokens for chat templates.
        template: chat template for texts, if the language model's file has none.
        placed: image token and surrounding text, for text-only templates.
        gelu: activation that llama.cpp calls "gelu".
        merge: patches per side that are merged into one token, if the file does not say.
        unused: weights that do not affect outputs and are not in the file.
    """

    keys: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    blocks: str = r"v\.blk\."
    listed: Callable[[Any], Names] = lambda of: {}
    output: tuple[str, int]
    vision: Callable[[Any], Mapping[str, Any]] = lambda of: {}
    more: Callable[[Any], Mapping[str, Any]] = lambda of: {}
    text: Callable[[Any, Any], Mapping[str, Any]] = lambda of, text: {}
    models: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, tuple[str, ...]]
    special: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    media: Callable[[Any], tuple[str, dict[str, Any], dict[str, dict[str, Any]]]]
    image: tuple[str, ...] = ("<image>",)
    template: str = _CHATML
    placed: str = "{}"
    language_model: str = "language_model"
    gelu: str = "gelu_pytorch_tanh"
    merge: int = 2
    unused: tuple[str, ...] = ()


_ATTENTION: Names = {**{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}, "attn_out": "self_attn.o_proj"}
_MLP: Names = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_GATED = mlp("mlp")
_CLIP: Names = _ATTENTION | _MLP | {"attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2"}


def _clip_outer(tower: str) -> Names:
    return {
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.post_ln": f"{tower}.post_layernorm",
    }


# LLaVA 1.5, and LLaVA 1.6, whose files have pinpoints: sizes of images in tiles. Original checkpoints have no image
# token: a token that does not occur in text is used instead.
_LLAVA_IMAGE = ("<image>", "<unk>", "<|reserved_special_token_0|>")


def _tiles(of: Any) -> dict[str, Any]:
    flat = of("vision.image_grid_pinpoints", [])
    of.expect("vision.mm_patch_merge_type", "spatial_unpad" if flat else "flat")
    return {"image_grid_pinpoints": [flat[at : at + 2] for at in range(0, len(flat), 2)]} if flat else {}


def _llava(of: Any) -> dict[str, Any]:
    layers = of("vision.feature_layer", [of("vision.block_count")])
    fields = _tiles(of) and {"model_type": "llava_next", **_tiles(of)}
    return {**fields, "vision_feature_layer": layers[0] if len(layers) == 1 else layers}


def _llava_media(of: Any) -> Any:
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    sizes = {"size": {"shortest_edge": of("vision.image_size")}, "crop_size": of.square(), **_tiles(of)}
    processor, images = ("LlavaNext", "LlavaNext") if _tiles(of) else ("Llava", "CLIP")
    options["patch_size"] = of("vision.patch_size")
    return f"{processor}Processor", options, {f"{images}ImageProcessor": sizes}


def _idefics3_media(of: Any) -> Any:
    size = of("vision.image_size")
    edges = {"size": of("vision.preproc_image_size", 4 * size), "max_image_size": size}
    edges = {name: {"longest_edge": edge} for name, edge in edges.items()}
    return _images("Idefics3", {"image_seq_len": of.length()}, **edges)


_GEMMA3_TOKENS = {
    "boi_token": ("<start_of_image>",),
    "eoi_token": ("<end_of_image>",),
    "image_token": ("<image_soft_token>", "<unused0>"),  # files may omit the first; its embedding is unused
}
_GEMMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_INTERNVL_TOKENS = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}


def _internvl_vision(of: Any) -> dict[str, Any]:
    size = (of("vision.embedding_length"), of("vision.block_count"))
    return {
        "attention_bias": "v.blk.0.attn_q.bias" in of.tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in of.tensors,
        "norm_type": "rms_norm" if size == (3200, 45) else "layer_norm",  # llama.cpp's criterion for InternViT-6B
    }


def _internvl_media(of: Any) -> Any:
    tiles = {f"{end}_patches": of(f"vision.preproc_{end}_tiles", most) for end, most in (("min", 1), ("max", 12))}
    images, videos = {"size": of.square(), "crop_to_patches": True, **tiles}, {"size": of.square()}
    parts = {"GotOcr2ImageProcessor": images, "InternVLVideoProcessor": videos}
    return "InternVLProcessor", {"image_seq_length": of.length()}, parts


_QWEN_KEYS = _SIZES | {"vision.block_count": "depth", "vision.attention.head_count": "num_heads"}
_QWEN: Names = {
    **{f"attn_{name}": ("attn.qkv", Rows()) for name in ("q", "k", "v", "qkv")},
    **{"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2", **_MLP},
}


_FRAMES: Names = dict.fromkeys(  # to a convolution over two frames
    ("v.patch_embd", "v.patch_embd.weight.1"),
    (f"{_VISUAL}.patch_embed.proj", lambda config, *frames: torch.stack(frames, 2)),
)


def _mrope(of: Any, text: Any) -> dict[str, Any]:
    sections = [size for size in of.language.get("rope.dimension_sections") if size]
    rope = {**text.rope_parameters, "mrope_section": sections}
    return {"model_type": f"{of.model_type}_text", "rope_parameters": rope}


def _qwen2_vision(of: Any) -> dict[str, Any]:
    width = of("vision.embedding_length")
    sizes = {"embed_dim": width, "hidden_size": of.width(), "mlp_ratio": of.inner() // width}
    return {**sizes, "spatial_merge_size": of.merge()}


def _qwen25_vision(of: Any) -> dict[str, Any]:
    every = of("vision.n_wa_pattern")
    windows = {"fullatt_block_indexes": list(range(every - 1, of("vision.block_count"), every)), "window_size": 112}
    return {**windows, "out_hidden_size": of.width(), "tokens_per_second": 2, "spatial_merge_size": of.merge()}


def _both(of: Any, name: str, parts: str, **options: Any) -> Any:
    """A processor of images and videos with the same options."""
    options["patch_size"] = of("vision.patch_size")
    return f"{name}Processor", {}, {f"{parts}{kind}Processor": options for kind in ("Image", "Video")}


def _images(name: str, options: dict[str, Any], **images: Any) -> Any:
    """A processor with options, and options of its image processor."""
    return f"{name}Processor", options, {f"{name}ImageProcessor": images}


def _qwen_media(name: str, pixels: tuple[int, int], of: Any) -> Any:
    size = dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))
    return _both(of, name, "Qwen2VL", merge_size=of.merge(), size=size)


def _patches(config: Any, kernel: Tensor) -> Tensor:
    """To a linear layer on patches: (out, height * width * colours)."""
    return kernel.permute(0, 2, 3, 1).flatten(1)


def _deep_layers(of: Any) -> list[int]:
    return [layer for layer, one in enumerate(of("vision.is_deepstack_layers", [])) if one]


def _deepstack(of: Any) -> Names:
    parts = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
    return {
        f"v.deepstack.{layer}.{name}": f"{_VISUAL}.deepstack_merger_list.{place}.{module}"
        for place, layer in enumerate(_deep_layers(of))
        for name, module in parts.items()
    }


def _qwen3_vision(of: Any) -> dict[str, Any]:
    sizes = {"out_hidden_size": of.width(), "spatial_merge_size": of.merge()}
    positions = of.tensors["v.position_embd.weight"].shape[0]
    return {**sizes, "num_position_embeddings": positions, "deepstack_visual_indexes": _deep_layers(of)}


def _lfm2(of: Any) -> dict[str, Any]:
    has = {"projector_bias": "mm.1.bias", "projector_use_layernorm": "mm.input_norm.weight"}
    sizes = {"downsample_factor": of.merge(), "projector_hidden_size": of.tensors["mm.1.weight"].shape[0]}
    return sizes | {name: tensor in of.tensors for name, tensor in has.items()}


def _pixtral(of: Any) -> dict[str, Any]:
    bias = {"multimodal_projector_bias": "mm.1.bias" in of.tensors, "vision_feature_layer": -1}
    if "mm.patch_merger.weight" not in of.tensors:
        return {**bias, "vision_feature_select_strategy": "full"}
    return {**bias, "model_type": "mistral3", "spatial_merge_size": of.merge()}


def _pixtral_media(of: Any) -> Any:
    patch, merge = of("vision.patch_size"), of.merge()
    images = {"patch_size": {"height": patch, "width": patch}, "size": {"longest_edge": of("vision.image_size")}}
    return _images("Pixtral", {"patch_size": patch, "spatial_merge_size": merge}, **images)


def _glm4v_vision(of: Any) -> dict[str, Any]:
    inner = of.tensors["mm.up.weight"].shape[0]  # of the merger; blocks have the merger's output size
    return {"intermediate_size": inner, "out_hidden_size": of.width(), "spatial_merge_size": of.merge()}


_MERGER = _CLIP | {"ln1": "layer_norm1", "ds_ln": "pre_norm", "ds_ffn_up": "linear_1", "ds_ffn_down": "linear_2"}
_DOWN = {"input_norm": "pre_norm", "up": "linear_1", "down": "linear_2"}
_MINICPM_TOKENS = {
    **{f"{kind}_token": (f"<|{kind}_pad|>",) for kind in ("image", "video")},
    **{f"{part}_start_token": (f"<{part}>",) for part in ("image", "slice", "image_id")},
    **{f"{part}_end_token": (f"</{part}>",) for part in ("image", "slice", "image_id")},
}


def _minicpm_vision(of: Any) -> dict[str, Any]:
    of.expect("vision.projector.scale_factor", 4)  # without the merger between layers, 2
    return {"image_size": isqrt(of.tensors["v.position_embd.weight"].shape[0]) * of("vision.patch_size")}


_GEMMA4_PARTS = ("image", "boi", "eoi", "audio", "boa", "eoa")
_GEMMA4_TEXTS = ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>")
_GEMMA4_TOKENS = {f"{part}_token": (token,) for part, token in zip(_GEMMA4_PARTS, _GEMMA4_TEXTS, strict=True)}


def _gemma4_vision(of: Any) -> dict[str, Any]:
    size = of.tensors["v.blk.0.attn_q_norm.weight"].shape[0]
    return {
        "head_dim": size,
        "num_key_value_heads": of.tensors["v.blk.0.attn_k.weight"].shape[0] // size,
        "pooling_kernel_size": of.merge(),
        "position_embedding_size": of.tensors["v.position_embd.weight"].shape[1],
        "use_clipped_linears": any(name.endswith(".input_max") for name in of.tensors),
        "standardize": "v.std_bias" in of.tensors,
    }


_PIXELS, _PIXELS3 = (4 * 28**2, 16384 * 28**2), (64 * 32**2, 16384 * 32**2)

_QWEN2 = Family(
    model_type="qwen2_vl",
    keys=_QWEN_KEYS,
    names=_QWEN,
    layers=f"{_VISUAL}.blocks.{{}}",
    outer={
        **_FRAMES,
        "v.post_ln": f"{_VISUAL}.merger.ln_q",
        "mm.0": f"{_VISUAL}.merger.mlp.0",
        "mm.2": f"{_VISUAL}.merger.mlp.2",
    },
    output=("mm.2.weight", 0),
    vision=_qwen2_vision,
    text=_mrope,
    tokens={
        **{f"vision_{end}_token_id": (f"<|vision_{end}|>",) for end in ("start", "end")},
        **{f"{kind}_token_id": (f"<|{kind}_pad|>",) for kind in ("image", "video")},
    },
    media=lambda of: _qwen_media("Qwen2VL", _PIXELS, of),
    image=("<|image_pad|>",),
    placed="<|vision_start|>{}<|vision_end|>",
)

FAMILIES: dict[str, Family] = {
    "mlp": Family(
        model_type="llava",
        names=_CLIP,
        layers=f"{_TOWER}.encoder.layers.{{}}",
        outer={
            **_clip_outer(_TOWER),
            "v.class_embd": f"{_TOWER}.embeddings.class_embedding",
            "v.pre_ln": f"{_TOWER}.pre_layrnorm",
            "mm.0": f"{_PROJECTOR}.linear_1",
            "mm.2": f"{_PROJECTOR}.linear_2",
            "model.image_newline": "model.image_newline",
            "v.image_newline": "model.image_newline",
        },
        output=("mm.2.weight", 0),
        vision=lambda of: {"model_type": "clip_vision_model"},
        more=_llava,
        tokens={"image_token_index": _LLAVA_IMAGE},
        special={"image_token": _LLAVA_IMAGE},
        media=_llava_media,
        image=_LLAVA_IMAGE,
        template=(
            "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() }}: "
            "{% endif %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
        ),
        placed="{}\n",
        gelu="gelu",
        unused=(f"{_TOWER}.post_layernorm.weight", f"{_TOWER}.post_layernorm.bias"),
    ),
    "idefics3": Family(  # and SmolVLM, which has the same architecture
        model_type="idefics3",
        names=_CLIP,
        layers="model.vision_model.encoder.layers.{}",
        outer={**_clip_outer("model.vision_model"), "mm.model.fc": "model.connector.modality_projection.proj"},
        output=("mm.model.fc.weight", 0),
        more=lambda of: {"scale_factor": of.merge()},
        tokens={"image_token_id": ("<image>",)},
        media=_idefics3_media,
        template=(
            "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}:"
            "{{ '' if message['content'].startswith('<image>') else ' ' }}{{ message['content'] }}<end_of_utterance>\n"
            "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
        ),
        language_model="text_model",
    ),
    "qwen2vl_merger": _QWEN2,
    "qwen2.5vl_merger": replace(
        _QWEN2,
        model_type="qwen2_5_vl",
        names={**_QWEN, **_GATED},
        vision=_qwen25_vision,
        media=lambda of: _qwen_media("Qwen2_5_VL", _PIXELS, of),
    ),
    "gemma3": Family(
        model_type="gemma3",
        names=_CLIP,
        layers=f"{_TOWER}.encoder.layers.{{}}",
        outer={
            **_clip_outer(_TOWER),
            "mm.input_projection": f"{_PROJECTOR}.mm_input_projection_weight",
            "mm.soft_emb_norm": (f"{_PROJECTOR}.mm_soft_emb_norm", minus_one),
        },
        output=("mm.input_projection.weight", 1),
        vision=lambda of: {"model_type": "siglip_vision_model", "vision_use_head": False},
        more=lambda of: {"mm_tokens_per_image": of.length()},
        tokens={f"{name}_index": tokens for name, tokens in _GEMMA3_TOKENS.items()},
        special=_GEMMA3_TOKENS,
        media=lambda of: _images("Gemma3", {"image_seq_length": of.length()}, size=of.square()),
        image=("<start_of_image>",),
        template=_GEMMA3_TEMPLATE,
        merge=4,
    ),
    "internvl": Family(
        model_type="internvl",
        names={
            **{f"attn_{name}": f"attention.{name}_proj" for name in "qkv"},
            **{f"attn_{name}_norm": f"attention.{name}_norm" for name in "qk"},
            **{"ls1": "lambda_1", "ls2": "lambda_2", "ln1": "layernorm_before", "ln2": "layernorm_after"},
            **{"attn_out": "attention.projection_layer", **_MLP},
        },
        layers=f"{_TOWER}.encoder.layer.{{}}",
        outer={
            "v.class_embd": f"{_TOWER}.embeddings.cls_token",
            "v.patch_embd": f"{_TOWER}.embeddings.patch_embeddings.projection",
            "v.position_embd": f"{_TOWER}.embeddings.position_embeddings",
            **{
                f"mm.model.mlp.{n}": f"{_PROJECTOR}.{name}"
                for n, name in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2"))
            },
        },
        output=("mm.model.mlp.3.weight", 0),
        vision=_internvl_vision,
        more=lambda of: {"downsample_ratio": 1 / of.merge(), "image_seq_length": of.length()},
        tokens={"image_token_id": ("<IMG_CONTEXT>",)},
        special={f"{name}_token": (token,) for name, token in _INTERNVL_TOKENS.items()},
        media=_internvl_media,
        image=("<IMG_CONTEXT>",),
        placed="{}\n",
        gelu="gelu",
    ),
    "qwen3vl_merger": replace(
        _QWEN2,
        model_type="qwen3_vl",
        models={"qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"},
        names={**_QWEN, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        outer={
            **_FRAMES,
            "v.position_embd": f"{_VISUAL}.pos_embed",
            "v.post_ln": f"{_VISUAL}.merger.norm",
            "mm.0": f"{_VISUAL}.merger.linear_fc1",
            "mm.2": f"{_VISUAL}.merger.linear_fc2",
        },
        listed=_deepstack,
        vision=_qwen3_vision,
        media=lambda of: _qwen_media("Qwen3VL", _PIXELS3, of),
    ),
    "lfm2": Family(
        model_type="lfm2_vl",
        names=_CLIP,
        layers=f"{_TOWER}.encoder.layers.{{}}",
        outer={
            **_clip_outer(_TOWER),
            "v.patch_embd": (f"{_TOWER}.embeddings.patch_embedding", _patches),
            "mm.input_norm": f"{_PROJECTOR}.layer_norm",
            "mm.1": f"{_PROJECTOR}.linear_1",
            "mm.2": f"{_PROJECTOR}.linear_2",
        },
        output=("mm.2.weight", 0),
        vision=lambda of: {
            "model_type": "siglip2_vision_model",
            "num_patches": of.tensors["v.position_embd.weight"].shape[0],
            "vision_use_head": False,
        },
        more=_lfm2,
        tokens={"image_token_id": ("<image>",)},
        media=lambda of: _images(
            "Lfm2Vl", {}, encoder_patch_size=of("vision.patch_size"), downsample_factor=of.merge()
        ),
    ),
    "pixtral": Family(  # and Mistral 3, which merges patches
        model_type="llava",
        names={
            **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            **{
                f"attn_{name}": (f"attention.{name}_proj", rotary("vision_config.num_attention_heads")) for name in "qk"
            },
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
        },
        layers=f"{_TOWER}.transformer.layers.{{}}",
        outer={
            "v.patch_embd": f"{_TOWER}.patch_conv",
            "v.pre_ln": f"{_TOWER}.ln_pre",
            "mm.input_norm": f"{_PROJECTOR}.norm",
            "mm.patch_merger": f"{_PROJECTOR}.patch_merger.merging_layer",
            "mm.1": f"{_PROJECTOR}.linear_1",
            "mm.2": f"{_PROJECTOR}.linear_2",
        },
        output=("mm.2.weight", 0),
        vision=lambda of: {
            "model_type": "pixtral",
            "rope_parameters": {"rope_type": "default", "rope_theta": of("rope.freq_base", 10_000.0)},
        },
        more=_pixtral,
        tokens={"image_token_index": ("[IMG]",)},
        media=_pixtral_media,
        image=("[IMG]",),
        gelu="gelu",
        merge=1,
    ),
    "glm4v": Family(
        model_type="glm4v",
        models={"glm4": "glm4v", "glm4moe": "glm4v_moe"},
        keys=_QWEN_KEYS | {"vision.attention.layer_norm_epsilon": "rms_norm_eps"},
        names={**_QWEN, **_GATED},
        layers=f"{_VISUAL}.blocks.{{}}",
        outer={
            **_FRAMES,
            "v.norm_embd": f"{_VISUAL}.post_conv_layernorm",
            "v.position_embd": f"{_VISUAL}.embeddings.position_embedding",
            "v.post_ln": f"{_VISUAL}.post_layernorm",
            "mm.patch_merger": f"{_VISUAL}.downsample",
            "mm.model.fc": f"{_VISUAL}.merger.proj",
            "mm.post_norm": f"{_VISUAL}.merger.post_projection_norm",
            **{f"mm.{name}": f"{_VISUAL}.merger.{name}_proj" for name in ("gate", "up", "down")},
        },
        output=("mm.down.weight", 0),
        vision=_glm4v_vision,
        text=_mrope,
        tokens={
            **{f"{kind}_token_id": (f"<|{kind}|>",) for kind in ("image", "video")},
            **{f"{kind}_start_token_id": (f"<|begin_of_{kind}|>",) for kind in ("image", "video")},
            **{f"{kind}_end_token_id": (f"<|end_of_{kind}|>",) for kind in ("image", "video")},
        },
        media=lambda of: _both(of, "Glm4v", "Glm4v", merge_size=of.merge()),
        image=("<|image|>",),
        placed="<|begin_of_image|>{}<|end_of_image|>",
        gelu="gelu",
    ),
    "minicpmv4_6": Family(
        model_type="minicpmv4_6",
        models={"qwen35": "minicpmv4_6"},
        names=_CLIP,
        layers=f"{_TOWER}.encoder.layers.{{}}",
        outer={
            **_clip_outer(_TOWER),
            **{f"v.vit_merger.{name}": f"{_TOWER}.vit_merger.{place}" for name, place in _MERGER.items()},
            **{f"mm.{name}": f"model.merger.mlp.0.{place}" for name, place in _DOWN.items()},
        },
        output=("mm.down.weight", 0),
        vision=_minicpm_vision,
        more=lambda of: {"insert_layer_id": of("vision.wa_layer_indexes", [6])[0]},
        tokens={f"{kind}_token_id": (f"<|{kind}_pad|>",) for kind in ("image", "video")},
        special=_MINICPM_TOKENS,
        media=lambda of: _both(of, "MiniCPMV4_6", "MiniCPMV4_6", scale_resolution=of("vision.image_size")),
        image=("<|image_pad|>",),
        placed="{}\n",
    ),
    "gemma4v": Family(
        model_type="gemma4",
        keys=_SIZES | {"vision.attention.layer_norm_epsilon": "rms_norm_eps"},
        names={
            **{name: f"{module}.linear|{module}" for name, module in {**_ATTENTION, **_GATED}.items()},
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "ln1": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
        },
        layers=f"{_TOWER}.encoder.layers.{{}}",
        outer={
            "v.patch_embd": (f"{_TOWER}.patch_embedder.input_proj", _patches),
            "v.position_embd": f"{_TOWER}.patch_embedder.position_embedding_table",
            "v.std_bias": f"{_TOWER}.std_bias",
            "v.std_scale": f"{_TOWER}.std_scale",
            "mm.input_projection": "model.embed_vision.embedding_projection",
        },
        output=("mm.input_projection.weight", 0),
        vision=_gemma4_vision,
        # llama.cpp's criterion for E2B and E4B
        text=lambda of, text: {"use_bidirectional_attention": None if of.width() in (1536, 2560) else "vision"},
        tokens={f"{name}_id": tokens for name, tokens in _GEMMA4_TOKENS.items() if name != "eoa_token"},
        special=_GEMMA4_TOKENS,
        media=lambda of: _images("Gemma4", {}, patch_size=of("vision.patch_size"), pooling_kernel_size=of.merge()),
        image=("<|image|>",),
        merge=3,
    ),
}
"""Family by projector type, ``clip.projector_type``."""
