"""Model classes for lmms-eval and lm-evaluation-harness, registered by entry points."""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """The model's entry in lmms-eval's registry, which imports the class after itself."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="mmspec", chat_class_path="mmspec.eval.adapters.lmms.MmspecLMM")
