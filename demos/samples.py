"""Examples on the page: held-out images and clips, photographs, text prompts."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gradio
from PIL import Image

from mmspec import plugins
from mmspec.demos.chat_request import ChatRequest, Kind, Upload
from mmspec.vision.embedded import photograph, samples
from mmspec.vision.video import load_video

_DRAWN: dict[Kind, dict[str, str]] = {
    "image": {
        "two-rings.png": "Two rings",
        "scene.png": "A sign",
        "five-shapes.png": "Five shapes",
        "three-shapes.png": "Three shapes",
    },
    "video": {"clip.mp4": "A clip", "another-clip.mp4": "Another clip"},
}
"""Labels of the package's samples. A tab opens on the first: of this picture, both embedded models write 40 tokens or
more (``smol-llava`` 17 of a photograph), with drafts in a quarter of the passes."""

_PHOTOGRAPHS = {
    photograph(): "A goldfish",
    Path(gradio.__file__).parent / "media_assets" / "images" / "tower.jpg": "A tower",
    Path(gradio.__file__).parent / "media_assets" / "images" / "lion.jpg": "A lion",
}
"""Of this package and of gradio; smol-llava did not see them in training."""

_LARGEST = 640
TRAINED_TEXTS = {
    "A word problem": "Max has 24 apples. He buys 3 bags of 6 apples. How many apples does Max have now?",
    "A Python function": (
        "Write a Python function count_of_list(items) that gives how many there are of all items that are even."
    ),
    "A room": (
        "Describe the room.\n- lamp: round, red, near the door\n- bed: round, purple, under the window\n"
        "- carpet: tall, red, beside the wall"
    ),
}
"""Example prompts for ``tiny-hybrid``, by their label on the page."""

TEXTS = {
    "A Python class": "Write a Python class Stack with push, pop and peek.",
    "A process": "What is photosynthesis? Explain it in three steps.",
    "A city": "What is the capital of France, and what is it known for?",
}
"""Example prompts for other models."""


@dataclass(frozen=True)
class Example:
    """An example on the page.

    Attributes:
        label: its name on the page.
        value: path of the image or video, or the prompt.
        icon: path of a picture of it, if any.
    """

    label: str
    value: str
    icon: str | None = None


def texts(model: str) -> list[Example]:
    """The prompts for a model, as many for each."""
    prompts = TEXTS if plugins.sees_photographs(model) else TRAINED_TEXTS
    return [Example(label, prompt) for label, prompt in prompts.items()]


def media(kind: Kind, folder: Path) -> list[Example]:
    """The images or clips of the package, copied to ``folder``."""
    copies = {label: shutil.copyfile(samples() / name, folder / name) for name, label in _DRAWN[kind].items()}
    return [Example(label, str(path), str(path) if kind == "image" else _still(path)) for label, path in copies.items()]


def photographs(drawn: Sequence[Example], folder: Path) -> list[Example]:
    """The examples for models that know photographs: as many as ``drawn``, and its first and last."""
    found = []
    for source, label in _PHOTOGRAPHS.items():
        if source.is_file():
            path = folder / source.name
            with Image.open(source) as image:
                image.thumbnail((_LARGEST, _LARGEST))
                image.save(path)
            found.append(Example(label, str(path), str(path)))
    return [drawn[0], *found, *drawn[1 + len(found) :]]


def example_of(request: ChatRequest, examples: Sequence[Example]) -> str | None:
    """Name of the file of the example that a request's only upload equals; None for others."""
    return _example(request.uploads[0], examples) if len(request.uploads) == 1 else None


def is_sample(request: ChatRequest, examples: Sequence[Example]) -> bool:
    """Whether a request's uploads, or its text, are among the examples for its model."""
    if not request.uploads:
        return request.prompt.strip() in [example.value for example in examples]
    return all(_example(upload, examples) for upload in request.uploads)


def _example(upload: Upload, examples: Sequence[Example]) -> str | None:
    try:
        paths = (Path(example.value) for example in examples)
        return next((path.name for path in paths if filecmp.cmp(upload.path, path, shallow=False)), None)
    except OSError:  # the upload was removed, which the request itself will report
        return None


def _still(clip: Path) -> str:
    """Write the first frame of a clip beside it; returns its path."""
    path = clip.with_suffix(".png")
    frame = load_video(clip, frames=1).frames[0]
    (frame if isinstance(frame, Image.Image) else Image.fromarray(frame)).save(path)
    return str(path)
