"""Prompts with random images for any vision-language class, without a tokenizer: image tokens between random ids.

The class's image processor, as transformers defines it, makes the pixel values; the number of image tokens, if it
has any, follows from the model's image features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, IMAGE_PROCESSOR_MAPPING, PreTrainedModel
from transformers.utils import is_torchvision_available

from mmspec.eval.decoding.small_configs import WORDS

_SIDES = (64, 96)  # height and width: position axes of the visual tokens differ in length
_ALIKE = {"glm4v_moe": "glm4v", "glm_ocr": "glm4v", "qwen3_vl_moe": "qwen3_vl"}
"""Model types without an image processor of their own, by the type whose processor their checkpoints name."""


def image_inputs(network: PreTrainedModel, lengths: list[int]) -> dict[str, Tensor]:
    """A left-padded batch of prompts with one random image each, as inputs of the model.

    Args:
        lengths: text tokens of each row.

    Raises:
        Exception: whatever the class's image processor or its vision tower raises.
        ValueError: the image processor needs a package, or makes something else.
    """
    config = network.config
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    encode = getattr(network, "get_image_features", None) or getattr(network.base_model, "get_image_features", None)
    pixels = _pixels(config, len(lengths))
    known = signature(network.forward).parameters
    wanted = signature(encode).parameters if encode is not None else {}
    pixels = {name: value for name, value in pixels.items() if name in known or name in wanted}
    if "pixel_values" not in pixels:
        raise ValueError("its image processor makes no pixel values")
    media = [token] if token is not None else []
    if media and encode is not None:
        with torch.no_grad():
            features = encode(**{name: value for name, value in pixels.items() if name in wanted})
        output = getattr(features, "pooler_output", None)
        output = getattr(features, "last_hidden_state", features) if output is None else output
        media *= _rows(output) // len(lengths)
    if (start := getattr(config, "vision_start_token_id", None)) is not None:
        media = [start, *media, config.vision_end_token_id]
    return {**_prompts(lengths, media, token, known), **pixels}


def _prompts(lengths: list[int], media: list[int], token: int | None, known: Mapping[str, Any]) -> dict[str, Tensor]:
    generator, longest = torch.Generator().manual_seed(0), max(lengths)
    rows, masks = [], []
    for length in lengths:
        words = torch.randint(5, WORDS, (length,), generator=generator).tolist()
        rows.append([0] * (longest - length) + [*words[:2], *media, *words[2:]])
        masks.append([int(place >= longest - length) for place in range(len(rows[-1]))])
    ids = torch.tensor(rows)
    inputs = {"input_ids": ids, "attention_mask": torch.tensor(masks)}
    kinds = [name for name in ("mm_token_type_ids", "token_type_ids") if name in known]
    visual = (ids == token).long() if token is not None else torch.zeros_like(ids)
    return {**inputs, **dict.fromkeys(kinds, visual)}


def _pixels(config: Any, images: int) -> dict[str, Tensor]:
    """What the class's image processor makes of random images of one size."""
    like = CONFIG_MAPPING[_ALIKE[config.model_type]] if config.model_type in _ALIKE else type(config)
    backends: Any = IMAGE_PROCESSOR_MAPPING[like]
    if "pil" not in backends and not is_torchvision_available():
        raise ValueError("its image processor needs torchvision")
    make = backends.get("pil") or backends["torchvision"]
    default, vision = make(), getattr(config, "vision_config", None)
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    options: dict[str, Any] = {}
    for name in ("size", "crop_size", "max_image_size"):
        if isinstance(side, int) and (size := getattr(default, name, None)):
            options[name] = {axis: side for axis, value in dict(size).items() if value is not None}
    for option, source in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        if isinstance(getattr(default, option, None), int) and isinstance(size := getattr(vision, source, None), int):
            options[option] = size
    processor = make(**options)
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (*_SIDES, 3), dtype=np.uint8) for _ in range(images)]
    encoded = processor(images=pictures, return_tensors="pt")
    tensors = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def _rows(features: Any) -> int:
    """Number of visual tokens."""
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    if not isinstance(features, Iterable):
        raise ValueError(f"image features of an unknown kind: {type(features).__name__}")
    return sum(_rows(part) for part in features)
