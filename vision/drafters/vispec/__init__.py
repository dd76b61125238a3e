"""ViSpec drafter."""

from __future__ import annotations

from mmspec.drafters.spec import DrafterSpec, published_as

SPEC = DrafterSpec(
    "vispec",
    "ViSpec",
    "EAGLE with one token per image, and an image vector in its text states (arXiv 2509.15235)",
    "mmspec.vision.drafters.vispec.drafter:ViSpec",
    weights="required",
    recognises=published_as("vispec"),
)
