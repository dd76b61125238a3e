"""Held-out prompts: synthetic scenes, clips and texts that no model was trained or tuned on.

Scenes come from ``seeded("heldout", index)``. Index ranges:

- below 4,000: validation during training of the embedded models, samples in the package, ``mmspec.eval.batching`` and
  ``mmspec.eval.serving``
- from 4,000 and 5,000: warm-up and prompts of ``mmspec.eval.speed``
- from 1,000,000: accuracy of the embedded models (``mmspec.vision.training.accuracy``)
- from 4,000,000: the embedded suite of ``mmspec eval`` (``mmspec.eval.suite.tasks.drawn``), 100,000 per task

Texts come from ``mmspec.ssm.texts.example(index, "heldout")``. Index ranges:

- below 100,000: validation during training of the embedded hybrid model
- from 4,000,000 and 5,000,000: warm-up and prompts of ``mmspec.eval.hybrid``
- from 6,000,000: the embedded suite of ``mmspec eval``
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmspec.ssm.texts import example
from mmspec.vision.scenes.clips import sample_clip
from mmspec.vision.scenes.conversations import one_image
from mmspec.vision.scenes.drawing import picture
from mmspec.vision.scenes.scene import Scene, sample_scene, seeded
from mmspec.vision.video import Video


@dataclass(frozen=True)
class Conversation:
    """A user's questions about the media of the first turn.

    Attributes:
        questions: one per turn.
        images, videos: attached to the first question; anything that the target accepts.
    """

    questions: tuple[str, ...]
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()

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


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Captions of held-out scenes, every other one replaced by the first question of a conversation about it."""
    requests = []
    for index in range(count):
        example = one_image(seeded("heldout", index))
        prompt = "Describe the image." if index % 2 else example.turns[0][0]
        requests.append({"prompt": prompt, "images": [picture(example.scenes[0])]})
    return requests


def video(scenes: list[Scene]) -> Video:
    """A video of one frame per second."""
    return Video(list(map(picture, scenes)), [float(k) for k in range(len(scenes))], float(len(scenes)), "clip")
