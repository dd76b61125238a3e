"""Drafters as they are published: EAGLE, MSD and ViSpec at small sizes, and files of checkpoints of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

CONFIGS = json.loads(Path(__file__).with_name("drafter_configs.json").read_text())
"""Published configurations by layout and name, with all fields that are known of them."""

TINY = dict(
    hidden_size=48,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=1,
    hidden_act="silu",
    rope_scaling=None,
    vocab_size=96,  # the tiny targets have 101
)
LLAVA = {**TINY, "model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"], "rms_norm_eps": 1e-5}
WIDE = {**LLAVA, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 6}
QWEN = {
    **TINY,
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
}
VICUNA = {**TINY, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6}
LLAMA3 = {**VICUNA, "rope_theta": 500000.0, "bias": False}
QWEN2 = {**TINY, "model_type": "qwen2", "qkv_bias": True, "rope_theta": 1e6}


def layer_of(config):
    """A decoder layer of transformers as the drafter has it: without the first norm, but for MSD on Qwen2-VL."""
    names = set(TINY) - {"rope_scaling"}
    settings = {name: config[name] for name in names} | {"rms_norm_eps": config.get("rms_norm_eps", 1e-6)}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    biased = config["model_type"].startswith("qwen")
    made = (Qwen2Config if biased else LlamaConfig)(**settings, attn_implementation="eager")
    layer = (Qwen2DecoderLayer if biased else LlamaDecoderLayer)(made, 0)
    if config["model_type"] != "qwen2_vl":
        layer.input_layernorm = nn.Identity()
    return made, layer


def tensors_of(config, device="cpu", dtype=torch.float32):
    """Contents of the authors' ``state_dict`` holds: embedding, ``fc`` and one layer."""
    width = config["hidden_size"]
    with torch.device(device):
        modules = {
            "embed_tokens": nn.Embedding(config["vocab_size"], width),
            "fc": nn.Linear(2 * width, width, bias=config.get("bias", True)),
            "layers.0": layer_of(config)[1],
        }
    g = torch.Generator().manual_seed(0)
    tensors = {f"{at}.{name}": value for at, part in modules.items() for name, value in part.state_dict().items()}
    if device == "meta":
        return tensors
    return {name: torch.randn(value.shape, generator=g).mul(0.2).to(dtype) for name, value in tensors.items()}


def write(folder, config, tensors=None, kind="safetensors"):
    """A folder as it lies on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(config) if tensors is None else tensors
    if kind in ("safetensors", "shards"):
        tensors = {name: value.contiguous() for name, value in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif kind == "old bin":
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        suffix, name = ("safetensors", "model") if kind == "shards" else ("bin", "pytorch_model")
        put = save_file if kind == "shards" else torch.save
        where = {}
        for i, some in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
            shard = f"{name}-{i:05}-of-00002.{suffix}"
            put({tensor: tensors[tensor] for tensor in some}, folder / shard)
            where |= dict.fromkeys(some, shard)
        index = {"metadata": {}, "weight_map": where}
        (folder / f"{name}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


# Fields of JLKang/ViSpec-llava-v1.6-vicuna-7b-hf and ViSpec-Qwen2.5-VL-3B-Instruct
LLAVA_NEXT = {**LLAVA, "model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"]}
LLAVA_NEXT |= {"pretraining_tp": 1, "pad_token_id": 0, "num_key_value_heads": 4}
QWEN2_5 = {**QWEN2, "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
QWEN2_5 |= {"use_sliding_window": False, "tie_word_embeddings": True, "num_key_value_heads": 4}
VISPEC = {"llava_next": LLAVA_NEXT, "llava": {**LLAVA_NEXT, "model_type": "llava"}, "qwen2_5_vl": QWEN2_5}


def vispec_tensors(config):
    """Tensors of ViSpec: an EAGLE head and an image adaptor."""
    g, width, heads = torch.Generator().manual_seed(1), config["hidden_size"], config["num_attention_heads"]
    shapes = {"imadpt.q": (2, heads, width // heads), "img_fc.weight": (width, 2 * width), "img_fc.bias": (width,)}
    shapes |= {f"imadpt.{part}_proj.weight": (width, width) for part in "kvo"}
    if config.get("qkv_bias"):
        shapes |= {f"imadpt.{part}_proj.bias": (width,) for part in "kv"}
    image = {name: torch.randn(shape, generator=g) * 0.15 for name, shape in shapes.items()}
    return {name: value * 0.5 for name, value in tensors_of(config).items()} | image  # no probability is 0
