"""Architecture of the embedded vision-language model: CLIP vision tower and Llama in transformers' LLaVA."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from mmspec.vision.scenes.vocabulary import SIDE, SLOT


@dataclass(frozen=True)
class Architecture:
    """Sizes of the model; `context` and `vocabulary` in tokens."""

    width: int = 192
    """Hidden size of both the tower and the language model."""
    tower_layers: int = 4
    tower_heads: int = 6
    tower_mlp: int = 512
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 384
    context: int = 2048
    vocabulary: int = 896


def llava_config(size: Architecture, tokens: dict[str, int]) -> LlavaConfig:
    """Returns the transformers configuration.

    Args:
        size: sizes of the model.
        tokens: ids of the tokens named "bos", "eos", "pad" and "image".
    """
    text = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        bos_token_id=tokens["bos"],
        eos_token_id=tokens["eos"],
        pad_token_id=tokens["pad"],
    )
    vision = CLIPVisionConfig(
        hidden_size=size.width,
        intermediate_size=size.tower_mlp,
        num_hidden_layers=size.tower_layers,
        num_attention_heads=size.tower_heads,
        image_size=SIDE,
        patch_size=SLOT,
        projection_dim=size.width,
        hidden_act="gelu_pytorch_tanh",
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokens["image"],
        image_seq_length=(SIDE // SLOT) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
