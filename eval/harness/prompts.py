"""Held-out requests: what drafters are measured on, drawn from scenes that nothing was trained or tuned on.

The scenes are drawn by ``seeded("heldout", index)``. Who uses which indices:

- below 4,000: watching the training of embedded models, samples in the package
- 4,000 and 5,000 on: warm-up and prompts of ``eval.speed``
- 1,000,000 on: accuracy of the embedded models (``vision.training.accuracy``)
- 2,000,000 on: acceptance (``eval.acceptance``), 100,000 to each suite
- 3,000,000 on: choosing FLASH's settings (``eval.flash``)
- 4,000,000 on: the embedded suite of ``mmspec eval`` (``eval.suite.tasks.drawn``), 100,000 to each task

Texts are drawn by ``ssm.texts.example(index, "heldout")``:

- below 100,000: watching the training of the embedded hybrid model, and its accuracy
- 4,000,000 and 5,000,000 on: warm-up and prompts of ``eval.hybrid``
- 6,000,000 on: the embedded suite of ``mmspec eval``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as count_from
from typing import Any

from PIL import Image

from ssm.texts import example
from vision.scenes.clips import sample_clip
from vision.scenes.conversations import BOTH, DESCRIBE, VIDEO, describe_prompt, several_images, words_only
from vision.scenes.drawing import draw
from vision.scenes.questions import ask
from vision.scenes.scene import Scene, sample_scene, seeded
from vision.video import Video

FIRST = 2_000_000
"""Held-out index from which the suites draw."""

ROOM = 100_000
"""Held-out indices of each suite."""


@dataclass(frozen=True)
class Conversation:
    """What a user asks, in turn, about the media shown with the first question.

    Attributes:
        questions: one per turn.
        images, videos: shown before the first question; whatever the target reads as such.
        counted: the first turn that is measured; those before are there for the history.
    """

    questions: tuple[str, ...]
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    counted: int = 0

    def request(self, answers: list[str]) -> dict[str, Any]:
        """The request for the next answer, after these answers to the questions before it.

        A question alone is a plain text, which models without a chat template take, too.
        """
        first: Any = self.questions[0]
        if not (answers or self.images or self.videos):
            return {"prompt": first, "images": [], "videos": []}
        if self.images or self.videos:
            media = [{"type": "image"} for _ in self.images] + [{"type": "video"} for _ in self.videos]
            first = [*media, {"type": "text", "text": first}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
        for answer, question in zip(answers, self.questions[1:], strict=False):
            messages += [{"role": "assistant", "content": answer.strip()}, {"role": "user", "content": question}]
        return {"prompt": messages, "images": list(self.images), "videos": list(self.videos)}


def _images(index: int, frames: int) -> Conversation:
    rng = seeded("heldout", index)
    return Conversation((rng.choice(DESCRIBE),), (_picture(sample_scene(rng)),))


def _videos(index: int, frames: int) -> Conversation:
    rng = seeded("heldout", index)
    return Conversation((rng.choice(VIDEO),), videos=(_clip(sample_clip(rng).frames(frames)),))


def _turns(index: int, frames: int) -> Conversation:
    rng = seeded("heldout", index)
    scene = sample_scene(rng)
    asked: list[str] = []
    while len(asked) < 2:
        question = ask(scene, rng)
        if question is not None and question.question not in asked:
            asked.append(question.question)
    return Conversation((rng.choice(DESCRIBE), *asked, describe_prompt(rng)), (_picture(scene),), counted=1)


def _several(index: int, frames: int) -> Conversation:
    rng = seeded("heldout", index)
    scenes = several_images(rng).scenes
    return Conversation((rng.choice(BOTH),), tuple(map(_picture, scenes)))


def _text(index: int, frames: int) -> Conversation:
    return Conversation(tuple(question for question, _ in words_only(seeded("heldout", index)).turns))


SUITES: dict[str, Callable[[int, int], Conversation]] = {
    "images": _images,
    "videos": _videos,
    "turns": _turns,
    "several": _several,
    "text": _text,
}
"""Captions of images and of videos, follow-up questions about an image, several images at once, no image."""


def suite(name: str, count: int, frames: int = 8) -> list[Conversation]:
    """The first ``count`` conversations of a suite, no two of them equal.

    Args:
        frames: per video.
    """
    found: list[Conversation] = []
    seen: set[tuple[str, ...]] = set()
    for index in count_from(FIRST + ROOM * list(SUITES).index(name)):
        if len(found) == count:
            return found
        conversation = SUITES[name](index, frames)
        # Without media, the same questions are the same conversation.
        if conversation.images or conversation.videos or conversation.questions not in seen:
            seen.add(conversation.questions)
            found.append(conversation)
    raise AssertionError("indices do not end")


def held_out_texts(count: int, first: int = 5_000_000) -> list[dict[str, Any]]:
    """Requests of all kinds of text that the embedded hybrid model is made for."""
    return [{"prompt": example(index, "heldout").prompt} for index in range(first, first + count)]


def held_out_requests(images: int, videos: int, frames: int = 8, first: int = 5000) -> list[dict[str, Any]]:
    """Captioning requests on scenes and clips that no embedded model was trained on, in one wording each."""
    requests: list[dict[str, Any]] = []
    for index in range(first, first + images):
        requests.append({"prompt": "Describe the image.", "images": [_picture(sample_scene(seeded("heldout", index)))]})
    for index in range(first, first + videos):
        clip = _clip(sample_clip(seeded("heldout", index)).frames(frames))
        requests.append({"prompt": "Describe the video.", "videos": [clip]})
    return requests


def _picture(scene: Scene) -> Image.Image:
    return Image.fromarray(draw(scene))


def _clip(scenes: list[Scene]) -> Video:
    return Video(
        [_picture(scene) for scene in scenes], [float(k) for k in range(len(scenes))], float(len(scenes)), "clip"
    )
