"""Vision-language models in training: transformers' modules, with logits computed at labelled positions only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from mmspec.training.loss import LossOutput, next_token_loss
from mmspec.vision.training.batches import ConversationBatch
from mmspec.vision.training.perception import PerceptionHeads, perception_loss

SDPA_FROM = 400
"""Sequence length from which fused attention trains faster."""

PERCEPTION_WEIGHT = 0.1
"""Weight of the tower's auxiliary loss while the whole model is trained."""


class TrainedLlava(nn.Module):
    """A LLaVA model with random weights in training, and the auxiliary heads of its vision tower."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.llava: Any = LlavaForConditionalGeneration(config)
        # Fused CPU attention has a slow backward pass for short sequences: matmuls took half the time.
        self.llava.model.vision_tower.set_attn_implementation("eager")
        vision: Any = config.vision_config
        self.heads = PerceptionHeads(vision.hidden_size)
        self.image_token = config.image_token_id

    def see(self, pixels: Tensor) -> Tensor:
        """Returns patch features (images, patches, width) of pixels (images, 3, 96, 96)."""
        return self.llava.model.vision_tower(pixels).last_hidden_state[:, 1:]

    def forward(self, batch: ConversationBatch) -> LossOutput:
        """Returns next-token loss plus weighted perception loss.

        Its metrics are the two losses, "language" and "perception", and the next-token accuracy "right".
        """
        model = self.llava.model
        embeds = model.language_model.embed_tokens(batch.tokens)  # (batch, length, width)
        perception = torch.zeros(())
        if len(batch.pixels):
            features = self.see(batch.pixels)
            at_image = (batch.tokens == self.image_token)[..., None]
            projected = model.multi_modal_projector(features)
            embeds = embeds.masked_scatter(at_image, projected.to(embeds.dtype))
            if bool((batch.perception >= 0).any()):
                perception = perception_loss(self.heads(features), batch.perception)
        long = batch.tokens.shape[1] > SDPA_FROM
        model.language_model.set_attn_implementation("sdpa" if long else "eager")
        hidden = model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        language, accuracy = next_token_loss(hidden, self.llava.lm_head, batch.labels)
        metrics = {"language": language.item(), "perception": perception.item(), "right": accuracy}
        return LossOutput(language + PERCEPTION_WEIGHT * perception, metrics)
