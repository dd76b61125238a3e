"""Complete model folders with random weights, as the hub lays them out: for tests of all that surrounds a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
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
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>\n{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

_GGUF = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
_GGUF |= {"attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 260, "rope.dimension_count": 16}


def tokenizer(vocab: int = 320, special: Sequence[str] = _SPECIAL) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly ``vocab`` entries."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
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
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def save_text_model(folder: Path, vocab: int = 320) -> Path:
    """A Llama of 0.1M parameters with a tokenizer."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(text_config(vocab))
    model.save_pretrained(folder)
    tokenizer(vocab).save_pretrained(folder)
    return folder


def write_gguf(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write a GGUF file.

    Args:
        metadata: values by name; None leaves one out.
        tensors: arrays, or pairs of stored bytes and the type, by name.
    """
    package = pytest.importorskip("gguf", reason="the package gguf is not installed")
    writer = package.GGUFWriter(str(file), metadata["general.architecture"])
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for name, value in metadata.items():
        if name == "general.alignment":
            writer.add_custom_alignment(value)
        elif name != "general.architecture" and value is not None:
            add[type(value)](name, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (np.asarray(value), None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
    """A matrix of ``save_gguf`` in Q4_0, Q4_1 or, outside of the layers, Q8_0, and its type."""
    module = pytest.importorskip("gguf", reason="the package gguf is not installed")
    kinds = module.GGMLQuantizationType
    kind = kinds.Q8_0 if block < 0 else kinds.Q4_1 if block else kinds.Q4_0
    random = np.random.default_rng([block + 1, *name.encode()])
    return module.quantize(random.standard_normal(shape).astype(np.float32) * 0.2, kind), kind


def save_gguf(
    file: Path,
    matrix: Callable[..., tuple[np.ndarray, Any]] = gguf_matrix,
    ends: Mapping[str, int] = MappingProxyType({}),
    entries: Mapping[str, Any] = MappingProxyType({}),
    factors: Mapping[str, Any] = MappingProxyType({}),
    base: float = 10000.0,
    alignment: int | None = None,
    pieces: Sequence[str] = (),
    **sizes: int,
) -> Path:
    """A llama.

    Args:
        matrix: name, number of the layer (-1 outside of the layers) and shape of a matrix to data and type.
        ends: further tokens that end an answer, by name: of a turn (eot), a message (eom).
        entries: further metadata.
        factors: tensors of factors of the rotary frequencies, by name.
        base: base of the rotary frequencies.
        alignment: of tensors, in bytes.
        pieces: of a SentencePiece vocabulary, after the special tokens and bytes; by default, it is byte-level BPE.
        sizes: of ``_GGUF``.
    """
    sizes = {**_GGUF, **sizes}
    metadata: dict[str, Any] = {"general.architecture": "llama", "general.name": "stand-in"}
    metadata |= {"general.alignment": alignment} if alignment is not None else {}
    metadata |= {f"llama.{name}": value for name, value in sizes.items()}
    metadata |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": base}
    letters = [chr(256 + i) for i in range(257)]
    tokens = [*letters, letters[0] + letters[1], "<s>", "</s>"]
    if pieces:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        metadata["tokenizer.ggml.token_type"] = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
        metadata["tokenizer.ggml.scores"] = [-float(number) for number in range(len(tokens))]
    else:
        metadata["tokenizer.ggml.merges"] = [f"{tokens[0]} {tokens[1]}"]
    metadata |= {"tokenizer.ggml.model": "llama" if pieces else "gpt2", "tokenizer.ggml.tokens": tokens}
    special = {"bos": tokens.index("<s>"), "eos": tokens.index("</s>"), **ends}
    metadata |= {f"tokenizer.ggml.{name}_token_id": token for name, token in special.items()}
    tensors = {f"{key}.weight": np.asarray(values, np.float32) for key, values in factors.items()}
    width, inner = sizes["embedding_length"], sizes["feed_forward_length"]
    shapes = {"attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width)}
    shapes |= {"attn_output": (width, width), "ffn_gate": (inner, width), "ffn_up": (inner, width)}
    shapes["ffn_down"] = (width, inner)
    ones = np.ones(width, dtype=np.float32)
    tensors |= {"output_norm.weight": ones, "token_embd.weight": matrix("token_embd", -1, (len(tokens), width))}
    for block in range(sizes["block_count"]):
        at = f"blk.{block}"
        tensors |= {f"{at}.{name}.weight": matrix(name, block, shape) for name, shape in shapes.items()}
        tensors |= {f"{at}.{norm}.weight": ones for norm in ("attn_norm", "ffn_norm")}
    write_gguf(file, {**metadata, **entries}, tensors)
    return file
