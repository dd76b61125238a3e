"""Models shipped with the package, as folders that transformers can load."""

from __future__ import annotations

from pathlib import Path

from mmspec.plugins import EmbeddedModel

_HERE = Path(__file__).parent


tiny_hybrid = EmbeddedModel(
    str(_HERE / "tiny-hybrid"),
    "tiny-hybrid was trained only on generated word problems, small programs and stories: its answers to other prompts "
    "are meaningless; choose another model for them, such as ibm-ai-platform/Bamba-9B-v2",
)
