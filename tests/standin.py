"""Complete model folders with random weights, as the hub lays them out: for tests of all that surrounds a model."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

_SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
_TEXT = "Describe the image and the video. A red circle is left of a small blue square; a star has five points. " * 4
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>\n{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def tokenizer(vocab: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly ``vocab`` entries."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
    )


def text_config(vocab: int = 320) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=1024,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def save_llava(folder: Path) -> Path:
    """A LLaVA of 0.1M parameters with tokenizer, processor, chat template and generation config."""
    torch.manual_seed(0)
    words = tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    config = LlavaConfig(vision_config=vision, text_config=text_config(), image_token_index=3, image_seq_length=16)
    model = LlavaForConditionalGeneration(config)
    model.get_output_embeddings().weight.data.normal_(std=0.5)  # spread logits: outputs that vary
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    LlavaProcessor(
        images,
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def save_text_model(folder: Path, vocab: int = 320) -> Path:
    """A Llama of 0.1M parameters with a tokenizer."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(text_config(vocab))
    model.save_pretrained(folder)
    tokenizer(vocab).save_pretrained(folder)
    return folder
