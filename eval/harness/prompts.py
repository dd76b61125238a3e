"""Held-out prompts: synthetic scenes, clips and texts that no model was trained or tuned on.

Scenes come from ``seeded("heldout", index)``. Index ranges:

- below 4,000: validation during training of the embedded models, samples in the package
- from 4,000 and 5,000: warm-up and prompts of ``mmspec.eval.speed``
- from 1,000,000: accuracy of the embedded models (``mmspec.vision.training.accuracy``)
- from 2,000,000: acceptance (``mmspec.eval.acceptance``), 100,000 per suite
- from 3,000,000: choosing FLASH's settings (``mmspec.eval.flash``)
- from 4,000,000: the embedded suite of ``mmspec eval`` (``mmspec.eval.suite.tasks.drawn``), 100,000 per task

Texts come from ``mmspec.ssm.texts.example(index, "heldout")``. Index ranges:

- below 100,000: validation during training of the embedded hybrid model
- from 1,000,000: its accuracy (``mmspec.eval.tiny_hybrid``)
- from 4,000,000 and 5,000,000: warm-up and prompts of ``mmspec.eval.hybrid``
- from 6,000,000: the embedded suite of ``mmspec eval``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as count_from
from typing import Any

from PIL import Image

from mmspec.ssm.texts import example
from mmspec.vision.scenes.clips import sample_clip
from mmspec.vision.scenes.conversations import BOTH, DESCRIBE, VIDEO, describe_prompt, several_images, words_only
from mmspec.vision.scenes.drawing import draw
from mmspec.vision.scenes.questions import ask
from mmspec.vision.scenes.scene import Scene, sample_scene, seeded
from mmspec.vision.video import Video

FIRST_INDEX = 2_000_000
"""First held-out index of the suites."""

INDICES_PER_SUITE = 100_000


@dataclass(frozen=True)
class Conversation:
    """A user's questions about the media of the first turn.

    Attributes:
        questions: one per turn.
        images, videos: attached to the first question; anything that the target accepts.
        counted: index of the first measured turn; earlier turns only provide history.
    """

    questions: tuple[str, ...]
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    counted: int = 0

    def request(self, answers: list[str]) -> dict[str, Any]:
        """The request for the next answer, given the answers so far.

        A single question without media stays plain text, for models without a chat template.
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
    return Conversation((rng.choice(DESCRIBE),), (picture(sample_scene(rng)),))


def _videos(index: int, frames: int) -> Conversation:
    rng = seeded("heldout", index)
    return Conversation((rng.choice(VIDEO),), videos=(video(sample_clip(rng).frames(frames)),))


def _turns(index: int, frames: int) -> Conversation:
    rng = seeded("heldout", index)
    scene = sample_scene(rng)
    asked: list[str] = []
    while len(asked) < 2:
        question = ask(scene, rng)
        if question is not None and question.question not in asked:
            asked.append(question.question)
    return Conversation((rng.choice(DESCRIBE), *asked, describe_prompt(rng)), (picture(scene),), counted=1)


def _several(index: int, frames: int) -> Conversation:
    rng = seeded("heldout", index)
    scenes = several_images(rng).scenes
    return Conversation((rng.choice(BOTH),), tuple(map(picture, scenes)))


def _text(index: int, frames: int) -> Conversation:
    return Conversation(tuple(question for question, _ in words_only(seeded("heldout", index)).turns))


SUITES: dict[str, Callable[[int, int], Conversation]] = {
    "images": _images,
    "videos": _videos,
    "turns": _turns,
    "several": _several,
    "text": _text,
}
"""Image captions, video captions, follow-up questions about an image, several images at once, text only."""


def suite_conversations(name: str, count: int, frames: int = 8) -> list[Conversation]:
    """The first ``count`` conversations of a suite, without duplicates.

    Args:
        frames: per video.
    """
    conversations: list[Conversation] = []
    seen: set[tuple[str, ...]] = set()
    for index in count_from(FIRST_INDEX + INDICES_PER_SUITE * list(SUITES).index(name)):
        if len(conversations) == count:
            return conversations
        conversation = SUITES[name](index, frames)
        # Without media, the same questions are the same conversation.
        if conversation.images or conversation.videos or conversation.questions not in seen:
            seen.add(conversation.questions)
            conversations.append(conversation)
    raise AssertionError("unreachable: the indices are infinite")


def held_out_texts(count: int, first: int = 5_000_000) -> list[dict[str, Any]]:
    """Requests of all kinds of text that the embedded hybrid model was trained on."""
    return [{"prompt": example(index, "heldout").prompt} for index in range(first, first + count)]


def held_out_requests(images: int, videos: int, frames: int = 8, first: int = 5000) -> list[dict[str, Any]]:
    """Captioning requests on held-out scenes and clips, with one fixed prompt each."""
    requests: list[dict[str, Any]] = []
    for index in range(first, first + images):
        requests.append({"prompt": "Describe the image.", "images": [picture(sample_scene(seeded("heldout", index)))]})
    for index in range(first, first + videos):
        scenes = sample_clip(seeded("heldout", index)).frames(frames)
        requests.append({"prompt": "Describe the video.", "videos": [video(scenes)]})
    return requests


def picture(scene: Scene) -> Image.Image:
    """The image of a scene."""
    return Image.fromarray(draw(scene))


def video(scenes: list[Scene]) -> Video:
    """A video of one frame per second."""
    return Video(list(map(picture, scenes)), [float(k) for k in range(len(scenes))], float(len(scenes)), "clip")
