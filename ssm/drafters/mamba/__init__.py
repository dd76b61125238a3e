"""Mamba-2 drafter."""

from mmspec.drafters.spec import DrafterSpec

SPEC = DrafterSpec(
    "mamba",
    "Mamba",
    "a small Mamba-2 language model of the target's vocabulary, distilled from it (Mamba-2: arXiv 2405.21060)",
    "mmspec.ssm.drafters.mamba.drafter:Mamba",
    weights="required",
    train="mamba",
)
