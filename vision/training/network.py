"""The model in training: transformers' own modules, called on ready batches with logits only where there are labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlavaConfig, LlavaForConditionalGeneration

from vision.training.batches import Batch
from vision.training.perception import IGNORE, PerceptionHeads, perception_loss

LONG = 400
"""Tokens from which fused attention is the faster one to train with."""


@dataclass
class Losses:
    """Losses of one batch; `right` of `labels` next tokens were guessed."""

    total: Tensor
    language: float
    perception: float
    right: int
    labels: int


class Network(nn.Module):
    """The LLaVA model and the tower's auxiliary heads."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.llava = LlavaForConditionalGeneration(config)
        # Fused CPU attention is slow to differentiate at few tokens: plain matmuls took half the time.
        self.llava.model.vision_tower.set_attn_implementation("eager")
        vision: Any = config.vision_config
        self.heads = PerceptionHeads(vision.hidden_size)
        self.image_token = config.image_token_id

    def see(self, pixels: Tensor) -> Tensor:
        """Patch features (images, 36, width) from pixels (images, 3, 96, 96)."""
        return self.llava.model.vision_tower(pixels).last_hidden_state[:, 1:]

    def forward(self, batch: Batch, perception_weight: float) -> Losses:
        """Next-token loss plus the weighted perception loss."""
        model = self.llava.model
        embeds = model.language_model.embed_tokens(batch.tokens)  # (batch, length, width)
        seen = torch.zeros(())
        if len(batch.pixels):
            features = self.see(batch.pixels)
            projected = model.multi_modal_projector(features)
            at_image = (batch.tokens == self.image_token)[..., None]
            embeds = embeds.masked_scatter(at_image, projected.to(embeds.dtype))
            if perception_weight > 0 and bool((batch.perception >= 0).any()):
                seen = perception_loss(self.heads(features), batch.perception)
        long = batch.tokens.shape[1] > LONG
        model.language_model.set_attn_implementation("sdpa" if long else "eager")
        hidden = model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        wanted = batch.labels != IGNORE
        truth = batch.labels[wanted]
        logits = self.llava.lm_head(hidden[wanted]).float()  # (labels, vocab)
        language = F.cross_entropy(logits, truth)
        right = int((logits.detach().argmax(-1) == truth).sum())
        total = language + perception_weight * seen
        return Losses(total, language.item(), seen.item(), right, len(truth))
