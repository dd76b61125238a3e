"""Things to try: held-out pictures and clips, drawn by the project's own code, and prompts."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from vision.embedded import samples
from vision.scenes.__main__ import SCALE, write_clip
from vision.scenes.clips import sample_clip
from vision.scenes.drawing import draw
from vision.scenes.scene import sample_scene, seeded

_SCENES = (9000, 9001, 9002, 9003)
_CLIPS = (9100,)

TEXTS = (
    "Max has 24 apples. He buys 3 bags of 6 apples. How many apples does Max have now?",
    "Write a Python function count_of_list(items) that gives how many there are of all items that are even.",
    "Work out: 37 + 48; 6 x 24; 90 - 35",
)


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
