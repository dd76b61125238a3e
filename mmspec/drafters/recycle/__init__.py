"""Token Recycling drafter."""

from mmspec.drafters.spec import DrafterSpec

SPEC = DrafterSpec(
    "recycle",
    "Recycle",
    "looks up what the target found likely after the same last tokens (arXiv 2408.08696); the default of all models",
    "mmspec.drafters.recycle.drafter:Recycle",
    weights="optional",
    train="recycle",
)
