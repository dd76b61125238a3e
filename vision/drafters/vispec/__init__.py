"""ViSpec drafter."""

from __future__ import annotations

from pathlib import Path

from mmspec.drafters.spec import DrafterSpec


def _recognises(folder: Path) -> bool:
    from mmspec.drafters.published import recognise

    return recognise(folder) == "vispec"


SPEC = DrafterSpec(
    "vispec",
    "ViSpec",
    "EAGLE with one token per image, and an image vector in its text states (arXiv 2509.15235)",
    "mmspec.vision.drafters.vispec.drafter:ViSpec",
    weights="required",
    recognises=_recognises,
)
