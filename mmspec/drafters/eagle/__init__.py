"""EAGLE drafter."""

from __future__ import annotations

from mmspec.drafters.spec import DrafterSpec, published_as

SPEC = DrafterSpec(
    "eagle",
    "EAGLE",
    "EAGLE-1 and EAGLE-2 heads, which extrapolate the target's hidden states (arXiv 2401.15077)",
    "mmspec.drafters.eagle.drafter:Eagle",
    weights="required",
    recognises=published_as("eagle"),
    train="msd --no-decoupled",
)
