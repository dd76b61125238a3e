"""MSD and FLASH drafters."""

from __future__ import annotations

from pathlib import Path

from mmspec.drafters.spec import DrafterSpec


def _recognises(folder: Path) -> bool:
    from mmspec.drafters.published import REFUSED, recognise

    return recognise(folder) in ("msd", *REFUSED)  # loading the latter says why they are refused


MSD = DrafterSpec(
    "msd",
    "MSD",
    "a small trained layer on the target's hidden states, text and images apart (arXiv 2505.14260)",
    "mmspec.vision.drafters.msd.drafter:MSD",
    weights="required",
    recognises=_recognises,
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
