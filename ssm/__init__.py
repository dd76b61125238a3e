"""Recurrent layers in mmspec: targets, tree operations, drafters, training and an embedded model."""

from __future__ import annotations

from pathlib import Path

from mmspec.plugins import EmbeddedModel

tiny_hybrid = EmbeddedModel(
    str(Path(__file__).parent / "embedded" / "tiny-hybrid"),
    "tiny-hybrid was trained only on generated word problems, small programs and stories: its answers to other prompts "
    "are meaningless; choose another model for them, such as ibm-ai-platform/Bamba-9B-v2",
)
