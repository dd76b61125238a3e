"""Vision-language models as targets: LLaVA-1.5, LLaVA-NeXT, LLaVA-NeXT-Video, LLaVA-OneVision, Qwen2-VL, Qwen2.5-VL and
Qwen3-VL, each the unmodified class of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mmspec.targets.target import Prompt
from mmspec.targets.transformers_target import TransformersTarget
from vision.processor import VisionProcessor

FAMILIES = ("llava", "llava_next", "llava_next_video", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


class VisionTarget(TransformersTarget):
    """A LLaVA-type or Qwen-VL model. See ``TransformersTarget``."""

    auto_class = AutoModelForImageTextToText
    processor_class = VisionProcessor

    @classmethod
    def supports(cls, config: Any) -> bool:
        return getattr(config, "model_type", None) in FAMILIES

    def _prompt_positions(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        # Qwen-VL places visual tokens on three position axes and computes them from the prompt.
        if "qwen" in self.model.config.model_type and bool(self._is_visual(ids).any()):
            return None
        return super()._prompt_positions(ids, mask)

    def _visual(self, prompt: Prompt) -> Tensor | None:
        return self._is_visual(prompt.input_ids)

    def _is_visual(self, ids: Tensor) -> Tensor:
        config = self.model.config
        marks = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
        return torch.isin(ids, torch.tensor([mark for mark in marks if mark is not None], device=ids.device))
