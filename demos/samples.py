"""Things to try: held-out pictures and clips, drawn by the project's own code, and prompts."""

from __future__ import annotations

import filecmp
from pathlib import Path

from PIL import Image

from demos.questions import Question
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
"""Prompts by what they are called on the page."""


def provided(question: Question, folder: Path) -> bool:
    """Whether a question is about a sample: one of the package's, or of those drawn into ``folder``."""
    if question.upload is None:
        return question.prompt.strip() in TEXTS.values()
    known = [*samples().iterdir(), *folder.iterdir()]
    try:
        return any(filecmp.cmp(question.upload.path, sample, shallow=False) for sample in known)
    except OSError:  # it is no longer here, which the answer will tell
        return False


def pictures(folder: Path) -> list[str]:
    """Paths of the shipped sample and of pictures drawn into ``folder``."""
    drawn = []
    for index in _SCENES:
        path = folder / f"scene-{index}.png"
        Image.fromarray(draw(sample_scene(seeded("heldout", index)), SCALE)).save(path)
        drawn.append(str(path))
    return [str(samples() / "scene.png"), *drawn]


def films(folder: Path) -> list[str]:
    """The same of clips."""
    drawn = []
    for index in _CLIPS:
        path = folder / f"clip-{index}.mp4"
        write_clip(sample_clip(seeded("heldout", index)), path)
        drawn.append(str(path))
    return [str(samples() / "clip.mp4"), *drawn]
