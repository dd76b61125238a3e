"""Network of MSD and FLASH (arXiv 2505.14260, 2505.12728): an ``EagleNetwork`` that treats visual positions apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspec.drafters.eagle.network import EagleNetwork
from mmspec.vision.drafters.msd import MSDConfig
from mmspec.vision.drafters.msd.latents import Images, Latents, compress, find_images


class MSDNetwork(EagleNetwork):
    """See the module."""

    config: MSDConfig

    def __init__(self, config: MSDConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        if config.decoupled and config.visual_states:
            self.visual_fc = nn.Linear(2 * width, width)
        if config.latents:
            self.latents = Latents(config.latents, width)

    def combine(self, embeds: Tensor, hidden: Tensor, visual: Tensor | None = None) -> Tensor:
        """Layer inputs, with decoupled text and visual positions (arXiv 2505.14260, section 3.2).

        Text positions fuse the next token's embedding with the previous hidden state; visual positions are the raw
        visual feature, or have their own projection.

        Args:
            embeds, hidden: see ``EagleNetwork.combine``.
            visual: (batch, nodes) bool, which of ``embeds`` are visual features; None if all are text.
        """
        fused = super().combine(embeds, hidden)
        if visual is None or not self.config.decoupled:
            return fused
        apart = self.visual_fc(torch.cat([embeds, hidden], dim=-1)) if self.config.visual_states else embeds
        return torch.where(visual[..., None], apart, fused)

    def images(self, visual: Tensor) -> Images | None:
        """Images to compress among ``visual`` entries, (batch, entries) bool; None if there are none."""
        config = self.config
        return find_images(visual, config.latents, config.span) if config.latents else None

    def kept(self, visual: Tensor, images: Images | None) -> Tensor | None:
        """Entries that remain, (batch, entries) bool; None if all do. ``images`` are those of ``visual``."""
        if self.config.hide_visual:
            return ~visual
        return None if images is None else images.kept(visual)

    def with_latents(self, embeds: Tensor, hidden: Tensor, images: Images) -> tuple[Tensor, Tensor]:
        """``embeds`` and ``hidden``, see ``combine``, with latents at their spots; no entry is dropped yet."""
        weights = self.latents(hidden, images)
        return compress(embeds, weights, images), compress(hidden, weights, images)
