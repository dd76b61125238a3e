"""Mamba-2 drafter."""

from mmspec.drafters.spec import DrafterSpec

SPEC = DrafterSpec(
    "mamba",
    "Mamba",
    "a small Mamba-2 language model of the target's vocabulary, distilled from it",
    "mmspec.ssm.drafters.mamba.drafter:Mamba",
    weights="required",
    train="mamba",
)
