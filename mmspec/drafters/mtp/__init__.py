"""Native MTP drafter."""

from __future__ import annotations

from pathlib import Path

from mmspec.drafters.spec import DrafterSpec


def _recognises(folder: Path) -> bool:
    from mmspec.drafters.mtp.network import has_mtp

    return has_mtp(folder)


SPEC = DrafterSpec(
    "mtp",
    "MTP",
    "the multi-token prediction layers that checkpoints of the target carry, over a tree's levels (arXiv 2412.19437)",
    "mmspec.drafters.mtp.drafter:MTP",
    weights="target",
    recognises=_recognises,
)
