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


class TrainedModel(nn.Module):
    """A vision-language model in training, and the auxiliary heads of its vision tower.

    Args:
        llava: the model, or its modules with the same names.
        config: of the model.
    """

    def __init__(self, llava: Any, config: LlavaConfig) -> None:
        super().__init__()
        self.llava = llava
        # Fused CPU attention has a slow backward pass for short sequences: matmuls took half the time.
        llava.model.vision_tower.set_attn_implementation("eager")
        vision: Any = config.vision_config
        self.heads = PerceptionHeads(vision.hidden_size)
        self.image_token = config.image_token_id

    def see(self, pixels: Tensor) -> Tensor:
        """Returns patch features (images, patches, width) of pixels (images, 3, 96, 96)."""
        return self.llava.model.vision_tower(pixels).last_hidden_state[:, 1:]

    def forward(self, batch: ConversationBatch, perception_weight: float) -> LossOutput:
        """Returns next-token loss plus weighted perception loss.

        A batch may have half as many visual tokens as patches: see `half_of_patches`.

        Its metrics are the two losses, "language" and "perception", and the next-token accuracy "right".
        """
        model = self.llava.model
        embeds = model.language_model.embed_tokens(batch.tokens)  # (batch, length, width)
        perception = torch.zeros(())
        if len(batch.pixels):
            features = self.see(batch.pixels)
            at_image = (batch.tokens == self.image_token)[..., None]
            halved = int(at_image.sum()) < features.shape[0] * features.shape[1]
            kept = half_of_patches(features) if halved else features
            projected = model.multi_modal_projector(kept)
            embeds = embeds.masked_scatter(at_image, projected.to(embeds.dtype))
            if perception_weight > 0 and bool((batch.perception >= 0).any()):
                perception = perception_loss(self.heads(features), batch.perception)
        long = batch.tokens.shape[1] > SDPA_FROM
        model.language_model.set_attn_implementation("sdpa" if long else "eager")
        hidden = model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        language, accuracy = next_token_loss(hidden, self.llava.lm_head, batch.labels)
        metrics = {"language": language.item(), "perception": perception.item(), "right": accuracy}
        return LossOutput(language + perception_weight * perception, metrics)


class TrainedLlava(TrainedModel):
    """A LLaVA model with random weights in training."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(LlavaForConditionalGeneration(config), config)


def half_of_patches(features: Tensor) -> Tensor:
    """Returns the first and last of every four rows of patches, (images, patches / 2, width).

    Every cell of a scene keeps two rows, and every line of characters one.
    """
    side = round(features.shape[1] ** 0.5)
    kept = [row for row in range(side) if row % 4 in (0, 3)]
    return features.unflatten(1, (side, side))[:, kept].flatten(1, 2)
