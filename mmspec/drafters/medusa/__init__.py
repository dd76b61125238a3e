"""Medusa and Hydra drafters."""

from __future__ import annotations

from mmspec.drafters.spec import DrafterSpec, published_as

MEDUSA = DrafterSpec(
    "medusa",
    "Medusa",
    "heads on the target's last state, one per token ahead, verified as a tree (arXiv 2401.10774)",
    "mmspec.drafters.medusa.drafter:Medusa",
    weights="required",
    recognises=published_as("medusa"),
    train="medusa",
)
HYDRA = DrafterSpec(
    "hydra",
    "Hydra",
    "Medusa's heads, which also read the tokens drafted before (arXiv 2402.05109)",
    "mmspec.drafters.medusa.drafter:Hydra",
    weights="required",
    recognises=published_as("hydra"),
    train="medusa --grounded",
)
