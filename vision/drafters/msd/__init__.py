"""MSD and FLASH drafters."""

from __future__ import annotations

from mmspec.drafters.spec import DrafterSpec, published_as

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
