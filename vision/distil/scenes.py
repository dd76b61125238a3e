"""Conversations about drawn scenes and pictures of the training sets, and requests about scenes, for a target."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec.distil.answering import PendingConversation
from mmspec.files import atomic
from mmspec.vision.pictures.compose import Composed
from mmspec.vision.pictures.conversations import Pictures
from mmspec.vision.pictures.library import Picture
from mmspec.vision.scenes.clips import sample_clip
from mmspec.vision.scenes.conversations import (
    DrawnConversation,
    one_image,
    questions_only,
    several_images,
    video,
    words_only,
)
from mmspec.vision.scenes.drawing import picture
from mmspec.vision.scenes.scene import sample_scene, seeded
from mmspec.vision.video import Video

Kinds = Mapping[str, tuple[Callable[[random.Random], DrawnConversation], float]]
"""How each kind of conversation is drawn, and its share."""

KINDS: Kinds = {
    "image": (one_image, 0.45),
    "questions": (questions_only, 0.15),
    "several": (several_images, 0.08),
    "video4": (lambda rng: video(rng, 4), 0.12),
    "video8": (lambda rng: video(rng, 8), 0.1),
    "words": (words_only, 0.1),
}


def picture_kinds(library: Sequence[Picture]) -> Kinds:
    """Returns the kinds of conversations about pictures of a library."""
    shown = Pictures(library)
    return {"picture": (shown.one, 0.8), "pictures": (shown.both, 0.08), "clip": (shown.clip, 0.12)}


def training_conversations(indices: Iterable[int], out: Path, kinds: Kinds = KINDS) -> Iterator[PendingConversation]:
    """Draws conversations about training scenes or pictures; saves their images as `OUT/images/*.png`.

    Args:
        indices: of training scenes. An index gives the same conversation in every run.
        out: folder of the data set. A clip is saved as several images, for models that take no videos.
        kinds: of the conversations; those about scenes by default.
    """
    for index in indices:
        kind = random.Random(f"kind {index}").choices(list(kinds), [share for _, share in kinds.values()])[0]
        example = kinds[kind][0](seeded("train", index))
        name = f"{kind}-{index:07d}"
        pictures = [
            {"type": "image", "path": str(_saved(scene, out / "images" / f"{name}-{number}.png"))}
            for number, scene in enumerate(example.scenes)
        ]
        questions: list[list[dict[str, Any]]] = [[{"type": "text", "text": question}] for question, _ in example.turns]
        questions[0] = pictures + questions[0]
        answers = tuple(answer for _, answer in example.turns)
        yield PendingConversation(name, questions, [len(answer) for answer in answers], known=answers)


def _saved(scene: Any, path: Path) -> Path:
    if not path.exists():
        with atomic(path) as part:
            image = Image.fromarray(scene.draw()) if isinstance(scene, Composed) else picture(scene)
            image.save(part, format="png")
    return path


def caption_requests(count: int) -> Iterator[dict[str, Any]]:
    """Requests to caption training scenes, every fifth one a clip of 8 frames."""
    for index in range(count):
        if index % 5:
            yield {"prompt": "Describe the image.", "images": [picture(sample_scene(seeded("train", index)))]}
        else:
            frames = [picture(scene) for scene in sample_clip(seeded("train", index)).frames(8)]
            clip = Video(frames, [float(k) for k in range(8)], 8.0, "clip")
            yield {"prompt": "Describe the video.", "videos": [clip]}
