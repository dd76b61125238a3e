"""Vision-language models as targets: any decoder-only image-text-to-text class of transformers, unmodified."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText

from mmspec.core.target import Prompt
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.processor import VisionProcessor


class VisionTarget(TransformersTarget):
    """``TransformersTarget`` for vision-language models."""

    auto_class = AutoModelForImageTextToText
    processor_class = VisionProcessor

    @classmethod
    def supports(cls, config: Any) -> bool:
        return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    def visual(self, prompt: Prompt) -> Tensor:
        config, ids = self.model.config, prompt.input_ids
        marks = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
        return torch.isin(ids, ids.new_tensor([mark for mark in marks if mark is not None]))
