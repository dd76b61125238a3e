"""DFlash drafter."""

from __future__ import annotations

from mmspec.drafters.spec import DrafterSpec, published_as

SPEC = DrafterSpec(
    "dflash",
    "DFlash",
    "a block of tokens in one pass, verified as a tree (arXiv 2602.06036, 2604.12989)",
    "mmspec.drafters.dflash.drafter:DFlash",
    weights="required",
    recognises=published_as("dflash"),
    train="dflash",
)
