"""Gemma-4 assistant drafter."""

from __future__ import annotations

from pathlib import Path

from mmspec.drafters.spec import DrafterSpec

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def _recognises(folder: Path) -> bool:
    from mmspec.drafters.checkpoint import read_config

    return (read_config(folder) or {}).get("model_type") in MODEL_TYPES


SPEC = DrafterSpec(
    "gemma4",
    "Gemma-4 assistant",
    "a few layers that attend to the target's own keys and values, published beside Gemma 4",
    "mmspec.drafters.gemma4.drafter:Gemma4",
    weights="published",
    recognises=_recognises,
)
