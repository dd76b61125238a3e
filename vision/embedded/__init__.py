"""Models that travel with the package, as folders that transformers loads."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def tiny_llava() -> str:
    """Folder of the embedded vision-language model."""
    return str(_HERE / "tiny-llava")


def samples() -> Path:
    """Folder of a held-out picture, `scene.png`, and a held-out video, `clip.mp4`."""
    return _HERE / "samples"
