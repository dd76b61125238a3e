"""Medusa and Hydra drafters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mmspec.drafters.spec import DrafterSpec


def _recognises(layout: str, folder: Path) -> bool:
    from mmspec.drafters.published import recognise

    return recognise(folder) == layout


MEDUSA = DrafterSpec(
    "medusa",
    "Medusa",
    "heads on the target's last state, one per token ahead, verified as a tree (arXiv 2401.10774)",
    "mmspec.drafters.medusa.drafter:Medusa",
    weights="required",
    recognises=partial(_recognises, "medusa"),
    train="medusa",
)
HYDRA = DrafterSpec(
    "hydra",
    "Hydra",
    "Medusa's heads, which also read the tokens drafted before (arXiv 2402.05109)",
    "mmspec.drafters.medusa.drafter:Hydra",
    weights="required",
    recognises=partial(_recognises, "hydra"),
    train="medusa --grounded",
)
