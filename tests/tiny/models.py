"""Tiny randomly initialised models of every supported architecture, with inputs and random drafters.

Weights have a large variance, so that greedy outputs vary instead of repeating one token, and top logits lie far apart.
``changes`` of a network's function are fields of its configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from mmspec.drafters.dflash import DFlashConfig, DFlashNetwork
from mmspec.drafters.eagle import EagleConfig, EagleNetwork
from mmspec.drafters.eagle3 import Eagle3Config, Eagle3Network
from mmspec.drafters.early_exit import KangarooConfig, KangarooNetwork
from mmspec.drafters.gemma4 import sharing_allowed
from mmspec.drafters.medusa import MedusaConfig, MedusaNetwork
from mmspec.drafters.mtp import MTPNetwork, build, layer_config
from mmspec.drafters.spec import LayerShape, RotaryShape
from mmspec.ssm.mamba import MambaConfig, MambaNetwork
from mmspec.vision.drafters.msd import MSDConfig, MSDNetwork
from mmspec.vision.drafters.vispec import ViSpecNetwork
from tests.tiny.configs import (
    HYBRID_CONFIGS,
    IMAGE,
    REFUSED,
    TEXT_CONFIGS,
    VIDEO,
    VISION_CONFIGS,
    VISION_END,
    VISION_START,
    VOCAB,
)

C = TypeVar("C")
N = TypeVar("N", bound=nn.Module)


def text_model(name: str) -> PreTrainedModel:
    """A random model of ``TEXT_CONFIGS`` or ``HYBRID_CONFIGS``; skips the test if it is ``REFUSED``."""
    if name in REFUSED:
        pytest.skip(f"{name} is refused with transformers {transformers.__version__}")
    torch.manual_seed(0)
    return _spread(AutoModelForCausalLM.from_config((TEXT_CONFIGS | HYBRID_CONFIGS)[name]())).eval()


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    """Enlarge the head's weights so that logits vary, and slow the decay of recurrent states."""
    module: Any
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.A_log.data.uniform_(-4, 1)
            names = ("dt_bias", "dt_proj_bias", "dt_proj.bias")
            parameters = dict(module.named_parameters())
            next(parameters[name] for name in names if name in parameters).data.normal_()
        if hasattr(module, "conv1d"):
            module.conv1d.weight.data.normal_(std=0.5)
            if hasattr(module, "D"):  # not Gated DeltaNet or KDA
                module.D.data.normal_()
                module.conv1d.bias.data.normal_(std=0.2)
        for name, weight in module.named_parameters(recurse=False):
            # The scale of ZAYA's keys, weights of Inkling 2 and the masks of Doge are 0 by default.
            if name in ("temp", "static_weight", "query", "A") and not weight.any():
                weight.data.normal_()
    head = model.get_output_embeddings()
    head.weight.data.normal_(std=0.5)
    return model


def vision_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of ``VISION_CONFIGS``."""
    torch.manual_seed(seed)
    model = _spread(AutoModelForImageTextToText.from_config(VISION_CONFIGS[name]())).eval()
    head: Any = model.get_output_embeddings()
    head.weight.data[[IMAGE, VIDEO]] = 0  # never emit image tokens: the top logits are above 0
    return model


def eagle_network(model: PreTrainedModel, seed: int = 0, **changes: Any) -> EagleNetwork:
    """A random EAGLE network for a model; see ``msd_network``."""
    return _random(EagleNetwork, EagleConfig.like(model.config.get_text_config(), **_like_qwen(model) | changes), seed)


def msd_network(model: PreTrainedModel, seed: int = 0, **changes: Any) -> MSDNetwork:
    """A random MSD network for a model, with the norm and biases of the published drafters for Qwen-VL."""
    return _random(MSDNetwork, MSDConfig.like(model.config.get_text_config(), **_like_qwen(model) | changes), seed)


def _like_qwen(model: PreTrainedModel) -> dict[str, Any]:
    return dict.fromkeys(("input_norm", "qkv_bias"), "qwen" in model.config.model_type)


def _random(kind: Callable[[C], N], config: C, seed: int, std: float = 0.2) -> N:
    torch.manual_seed(seed)
    network = kind(config)
    for parameter in network.parameters():
        parameter.data.normal_(std=std)
    return network


def eagle3_network(model: PreTrainedModel, seed: int = 0, head: int = 40, **changes: Any) -> Eagle3Network:
    """A random EAGLE-3 network for a model, with position axes if the model has them.

    Args:
        head: rows of its output layer, the draft vocabulary.
    """
    decoder = model.config.get_text_config()
    return _random(Eagle3Network, Eagle3Config.like(decoder, head=head, rope=_rope(decoder), **changes), seed)


def dflash_network(model: PreTrainedModel, seed: int = 0, **changes: Any) -> DFlashNetwork:
    """A random DFlash network for a model, with blocks of 5 and, in the second of two layers, a window of 3."""
    decoder = model.config.get_text_config()
    shape = {"block_size": 5, "mask_token_id": 99, "target_layer_ids": [0, 1], "layers": 2, "sliding": [1], "window": 3}
    return _random(DFlashNetwork, DFlashConfig.like(decoder, **shape | changes), seed)


def kangaroo_network(model: PreTrainedModel, seed: int = 0, exit_layer: int = 1) -> KangarooNetwork:
    """A random network of Kangaroo for a model."""
    config = KangarooConfig.like(model.config.get_text_config(), mlp=0, exit_layer=exit_layer)
    return _random(KangarooNetwork, config, seed)


def medusa_network(model: PreTrainedModel, seed: int = 0, prefix: bool = False, **changes: Any) -> MedusaNetwork:
    """A random network of Medusa for a model, with four heads.

    Args:
        prefix: with a decoder layer (Hydra++).
    """
    decoder = model.config.get_text_config()
    layer = asdict(RotaryShape.like(decoder)) if prefix else {}
    fields = {"hidden_size": decoder.hidden_size, "heads": 4, "prefix": layer, **changes}
    return _random(MedusaNetwork, MedusaConfig(**fields), seed)


def mtp_network(model: PreTrainedModel, seed: int = 0) -> MTPNetwork:
    """A random MTP layer of Qwen3.5's kind for a model, with position axes as if the model had them."""
    shape, sections = LayerShape.like(model.config.get_text_config()), _rope(model.config.get_text_config())
    config = Qwen3_5TextConfig(
        vocab_size=model.config.get_text_config().vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **sections},
    )
    return _random(lambda config: MTPNetwork(build(layer_config(config, "tiny"))[0]), config, seed)


def gemma4_assistant(model: PreTrainedModel, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random Gemma-4 assistant for a model, with two layers that read the model's last one with full attention."""
    decoder = model.config.get_text_config()
    last = decoder.per_layer_config[decoder.num_hidden_layers - 1] if decoder.is_heterogeneous else decoder
    shape = LayerShape.like(last)
    text = {
        "vocab_size": decoder.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * shape.kv_heads,
        "num_key_value_heads": shape.kv_heads,
        "num_global_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "global_head_dim": shape.head_dim,
        "layer_types": ["full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
        "pad_token_id": 0,
    }
    own = {name: changes.pop(name) for name in list(changes) if name in _ASSISTANT}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text | changes), backbone_hidden_size=shape.hidden_size, **own
    )
    with sharing_allowed():
        made: PreTrainedModel = _random(Gemma4AssistantForCausalLM, config, seed).eval()
    return made


_ASSISTANT = ("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k", "tie_word_embeddings")


def vispec_network(model: PreTrainedModel, seed: int = 0) -> ViSpecNetwork:
    """A random ViSpec network for a model."""
    return _random(ViSpecNetwork, MSDConfig.like(model.config.get_text_config()), seed, std=0.15)


def _rope(decoder: Any) -> dict[str, Any]:
    """Position axes in equal sections for a model that has them."""
    if "mrope_section" not in (decoder.rope_parameters or {}):
        return {}
    half = LayerShape.like(decoder).head_dim // 2
    third = half // 3
    return {"mrope_section": [half - 2 * third, third, third], "mrope_interleaved": True}


def mamba_network(vocab: int = VOCAB, seed: int = 0, **changes: Any) -> MambaNetwork:
    """A random network of the mamba drafter."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 24, "layers": 2, "heads": 3, "head_dim": 4, "state": 5, **changes}
    network = MambaNetwork(MambaConfig(vocab, **shape))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.4)
        else:  # norms, step sizes and decays stay near their defaults
            parameter.data += 0.3 * torch.randn_like(parameter)
    return network


def text_inputs(batch: int = 1, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts; row i is left-padded by i tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (batch, length), generator=g)
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, :row], mask[row, :row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def vision_inputs(name: str, batch: int = 1, images: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts with ``images`` random images each, and one video for models that take videos."""
    g = torch.Generator().manual_seed(seed)
    inputs = text_inputs(batch, 8, seed)
    rows, masks = [], []
    extras: dict[str, list[torch.Tensor]] = {}

    def add(key: str, value: torch.Tensor) -> None:
        extras.setdefault(key, []).append(value)

    for row in range(batch):
        media: list[int] = []
        if name.startswith("qwen") and images:
            add("pixel_values_videos", torch.randn(2 * 8 * 4, 3 * 2 * 16, generator=g))
            add("video_grid_thw", torch.tensor([[2, 8, 4]]))
            if name == "qwen2_5_vl":
                add("second_per_grid_ts", torch.tensor([0.5 + row]))
            frames = [8, 8] if name in ("qwen3_vl", "qwen3_5") else [16]  # with the time before each, or all at once
            for number, tokens in enumerate(frames):
                media += [5 + number, VISION_START, *[VIDEO] * tokens, VISION_END]
        for _ in range(images):
            if name.startswith("qwen"):
                patch = 3 * 2 * 16
                # Taller than wide, so that the position ids of the last visual token differ by axis.
                add("pixel_values", torch.randn(8 * 4, patch, generator=g))
                add("image_grid_thw", torch.tensor([[1, 8, 4]]))
                media += [VISION_START, *[IMAGE] * 8, VISION_END]
            elif name in ("llava", "llava_bamba"):
                add("pixel_values", torch.randn(1, 3, 16, 16, generator=g))
                media += [IMAGE] * 16
            else:
                add("pixel_values", torch.randn(1, 3, 3, 16, 16, generator=g))
                add("image_sizes", torch.tensor([[16, 32]]))
                media += [IMAGE] * _next_tokens(name)
        if name in ("llava_next_video", "llava_onevision") and images:
            add("pixel_values_videos", torch.randn(1, 2, 3, 16, 16, generator=g))
            media += [VIDEO] * (2 * 4 if name == "llava_next_video" else 2 * 4 + 1)
        ids, mask = inputs["input_ids"][row], inputs["attention_mask"][row]
        rows.append(torch.cat([ids[:row], torch.tensor(media, dtype=torch.long), ids[row:]]))
        masks.append(torch.cat([mask[:row], torch.ones(len(media), dtype=torch.long), mask[row:]]))
    ids = torch.stack(rows)
    result = {"input_ids": ids, "attention_mask": torch.stack(masks)}
    if name.startswith("qwen"):
        result["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    return {**result, **{key: torch.cat(values) for key, values in extras.items()}}


def video_inputs(name: str, frames: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random prompt of a Qwen-VL model with one video, by default of more frames than the picture has rows."""
    g = torch.Generator().manual_seed(seed)
    words = text_inputs(1, 8, seed)["input_ids"][0].tolist()
    parts = [4] * frames if name in ("qwen3_vl", "qwen3_5") else [4 * frames]
    media = [token for tokens in parts for token in (5, VISION_START, *[VIDEO] * tokens, VISION_END)]
    ids = torch.tensor([[*words[:4], *media, *words[4:]]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == VIDEO).long(),
        "pixel_values_videos": torch.randn(frames * 4 * 4, 3 * 2 * 16, generator=g),
        "video_grid_thw": torch.tensor([[frames, 4, 4]]),
    }


def _next_tokens(name: str) -> int:
    """Visual tokens of a 16x32 image: 16 base tokens, and 4 rows of 8 unpadded tokens with a newline each."""
    return 16 + 4 * (8 + 1)


def generate(model: Any, batch: int, **options: Any) -> torch.Tensor:
    """The output of transformers' ``generate``."""
    if hasattr(model, "_setup_cache"):  # the modules of RecurrentGemma keep the states of the last call
        model._setup_cache(model.config, batch, model.device, model.dtype)
    tokens: torch.Tensor = model.generate(**options)
    return tokens
