"""DFlash drafter."""

from __future__ import annotations

from pathlib import Path

from mmspec.drafters.spec import DrafterSpec


def _recognises(folder: Path) -> bool:
    from mmspec.drafters.published import recognise

    return recognise(folder) == "dflash"


SPEC = DrafterSpec(
    "dflash",
    "DFlash",
    "a block of tokens in one pass, verified as a tree (arXiv 2602.06036, 2604.12989)",
    "mmspec.drafters.dflash.drafter:DFlash",
    weights="required",
    recognises=_recognises,
    train="dflash",
)
