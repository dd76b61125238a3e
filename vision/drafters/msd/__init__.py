"""MSD and FLASH drafters: declarations and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.checks import FLAG, option, whole
from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.spec import DrafterSpec, published_as
from mmspec.errors import UserError


@dataclass(frozen=True)
class MSDConfig(EagleConfig):
    """Configuration of an ``MSDNetwork``: an ``EagleConfig``, and

    Attributes:
        decoupled: visual positions take the raw visual feature (MSD); False fuses them with a hidden state, as text.
        visual_states: separate projection of feature and hidden state at visual positions, which costs nothing per
            token. False is MSD as published.
        latents: latents per image (FLASH); 0 disables compression.
        span: maximum visual tokens per image: longer runs are split into several images; 0 never splits.
        hide_visual: visual positions are not read at all (HiViS, arXiv 2509.23928).
    """

    decoupled: bool = option(True, FLAG)
    visual_states: bool = option(False, FLAG)
    latents: int = option(0, whole(0, 2**12))
    span: int = option(0, whole(0, 2**20))
    hide_visual: bool = option(False, FLAG)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hide_visual and self.latents:
            raise UserError(f"one of hide_visual and latents must be off: got both, {self.latents} latents")


MSD = DrafterSpec(
    "msd",
    "MSD",
    "a small trained layer on the target's hidden states, text and images apart (arXiv 2505.14260)",
    "mmspec.vision.drafters.msd.drafter:MSD",
    weights="required",
    recognises=published_as("msd", "domino"),  # loading the latter says why it is refused
    train="msd",
)
FLASH = DrafterSpec(
    "flash",
    "FLASH",
    "MSD's small trained layer with compressed images, and several tokens per pass of it (arXiv 2505.12728)",
    "mmspec.vision.drafters.msd.drafter:Flash",
    weights="required",
    train="flash",
)
