"""Examples on the page: held-out images and clips that are rendered at start, and text prompts."""

from __future__ import annotations

import filecmp
from pathlib import Path

from PIL import Image

from demos.chat_request import ChatRequest
from vision.embedded import samples
from vision.scenes.__main__ import SCALE, write_clip
from vision.scenes.clips import sample_clip
from vision.scenes.drawing import draw
from vision.scenes.scene import sample_scene, seeded

_SCENES = (7_000_001, 7_000_002, 7_000_003)
_CLIPS = (7_000_100,)

TEXTS = {
    "A word problem": "Max has 24 apples. He buys 3 bags of 6 apples. How many apples does Max have now?",
    "A Python function": (
        "Write a Python function count_of_list(items) that gives how many there are of all items that are even."
    ),
    "A room": (
        "Describe the room.\n- lamp: round, red, near the door\n- bed: round, purple, under the window\n"
        "- carpet: tall, red, beside the wall"
    ),
}
"""Example prompts by their label on the page."""


def is_sample(request: ChatRequest, folder: Path) -> bool:
    """Whether a request's upload is one of the package's samples or of those in ``folder``, or its text an example."""
    if request.upload is None:
        return request.prompt.strip() in TEXTS.values()
    known = [*samples().iterdir(), *folder.iterdir()]
    try:
        return any(filecmp.cmp(request.upload.path, sample, shallow=False) for sample in known)
    except OSError:  # the upload was removed, which the request itself will report
        return False


def sample_images(folder: Path) -> list[str]:
    """Render example images into ``folder``; returns their paths and that of the shipped sample."""
    rendered = []
    for index in _SCENES:
        path = folder / f"scene-{index}.png"
        Image.fromarray(draw(sample_scene(seeded("heldout", index)), SCALE)).save(path)
        rendered.append(str(path))
    return [str(samples() / "scene.png"), *rendered]


def sample_videos(folder: Path) -> list[str]:
    """Render example clips into ``folder``; returns their paths and that of the shipped sample."""
    rendered = []
    for index in _CLIPS:
        path = folder / f"clip-{index}.mp4"
        write_clip(sample_clip(seeded("heldout", index)), path)
        rendered.append(str(path))
    return [str(samples() / "clip.mp4"), *rendered]
