"""Models that travel with the package, as folders that transformers loads."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def tiny_hybrid() -> str:
    """Folder of the embedded hybrid language model."""
    return str(_HERE / "tiny-hybrid")
