"""A scaled-up pipeline with its drafters."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

import mmspec
from mmspec.core.drafter import Drafter
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.scale_up.axes import Shape
from mmspec.eval.scale_up.drafters import scale_up_drafter
from mmspec.eval.scale_up.models import scale_up
from mmspec.pipeline import Pipeline


def scaled_pipeline(
    model: str, shape: Shape, drafters: str, dtype: torch.dtype, device: torch.device
) -> tuple[Pipeline, dict[str, Drafter]]:
    """A model in a big shape, without a drafter, and its drafters by label, scaled up if they have a network.

    Args:
        drafters: as for ``parse_drafters``.
        device: the big model's.
    """
    small = mmspec.load(model, drafter=None, dtype="float32", device="cpu")
    big = scale_up(small.model, shape, device=device, dtype=dtype)
    scaled = {
        label: scale_up_drafter(drafter, small.model, big)
        for label, drafter in parse_drafters(drafters, small.model.config.name_or_path).items()
    }
    gc.collect()  # the small model
    return Pipeline(type(small.target)(big), small.io, name=model), scaled


def prompt_tokens(pipe: Pipeline, request: Mapping[str, Any]) -> int:
    """KV slots that a prompt fills: masked tokens are not kept."""
    prompt = pipe.encode([request])
    length = prompt.input_ids.shape[1]
    return length if prompt.attention_mask is None else int(prompt.attention_mask.sum())
