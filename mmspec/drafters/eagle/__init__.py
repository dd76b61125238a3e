"""EAGLE drafter."""

from __future__ import annotations

from pathlib import Path

from mmspec.drafters.spec import DrafterSpec


def _recognises(folder: Path) -> bool:
    from mmspec.drafters.published import recognise

    return recognise(folder) == "eagle"


SPEC = DrafterSpec(
    "eagle",
    "EAGLE",
    "EAGLE-1 and EAGLE-2 heads, which extrapolate the target's hidden states (arXiv 2401.15077)",
    "mmspec.drafters.eagle.drafter:Eagle",
    weights="required",
    recognises=_recognises,
    train="msd --no-decoupled",
)
