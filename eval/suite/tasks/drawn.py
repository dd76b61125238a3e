"""The embedded suite: held-out scenes, clips and texts that the package draws itself. It needs no files and no network.

``eval.harness.prompts`` says which held-out indices are whose; these tasks draw from ``FIRST`` on, ``ROOM`` each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count as count_from

from PIL import Image, ImageDraw

from eval.harness.prompts import ROOM, Conversation
from eval.suite.sample import Sample, Scorer
from eval.suite.scoring import drawn
from eval.suite.tasks.task import Task
from ssm.texts import example
from vision.scenes.clips import sample_clip
from vision.scenes.conversations import BOTH, DESCRIBE, VIDEO, describe_prompt, several_images
from vision.scenes.drawing import draw
from vision.scenes.questions import Question, ask
from vision.scenes.scene import Scene, sample_scene, seeded
from vision.scenes.vocabulary import BACKGROUNDS, COLOURS
from vision.video import Video

FIRST = 4_000_000
"""Held-out scene from which these tasks draw."""

FIRST_TEXT = 6_000_000
"""Held-out text from which ``texts`` draws."""

Drawn = Callable[[random.Random, int], tuple[Conversation, str, tuple[tuple[str, ...], ...], object]]
"""Conversation, category, references and what the scorer needs, from a generator and the frames of a video."""


def _picture(scene: Scene) -> Image.Image:
    return Image.fromarray(draw(scene))


def _caption(rng: random.Random, frames: int) -> tuple[Conversation, str, tuple[tuple[str, ...], ...], object]:
    scene = sample_scene(rng)
    return Conversation((rng.choice(DESCRIBE),), (_picture(scene),)), "captions", (), scene


def _asking(kind: str | None) -> Drawn:
    """Questions of a kind, or of all but counting and reading, which have tasks of their own."""

    def one(rng: random.Random, frames: int) -> tuple[Conversation, str, tuple[tuple[str, ...], ...], object]:
        while True:
            scene = sample_scene(rng, 1.0 if kind == "text" else 0.4)
            question = ask(scene, rng, kind)
            if question is not None and (kind or question.kind not in ("count", "text")):
                return Conversation((question.question,), (_picture(scene),)), question.kind, (), [question]

    return one


def _turns(rng: random.Random, frames: int) -> tuple[Conversation, str, tuple[tuple[str, ...], ...], object]:
    scene = sample_scene(rng)
    asked: list[Question | None] = [None]
    while len(asked) < 3:
        question = ask(scene, rng)
        if question is not None and question not in asked:
            asked.append(question)
    texts = tuple(describe_prompt(rng) if question is None else question.question for question in asked)
    return Conversation(texts, (_picture(scene),)), "conversation", (), asked


def _several(rng: random.Random, frames: int) -> tuple[Conversation, str, tuple[tuple[str, ...], ...], object]:
    scenes = several_images(rng).scenes
    both = Scene("white", tuple(item for scene in scenes for item in scene.items))
    return Conversation((rng.choice(BOTH),), tuple(map(_picture, scenes))), "images", (), both


def _video(rng: random.Random, frames: int) -> tuple[Conversation, str, tuple[tuple[str, ...], ...], object]:
    clip = sample_clip(rng)
    seconds = float(frames)
    shown = Video(list(map(_picture, clip.frames(frames))), [float(k) for k in range(frames)], seconds, "clip")
    return Conversation((rng.choice(VIDEO),), videos=(shown,)), "video", (), clip


def _chart(rng: random.Random, frames: int) -> tuple[Conversation, str, tuple[tuple[str, ...], ...], object]:
    """A bar chart. No embedded model was trained on any: what it says is wrong, and takes its time."""
    colours = rng.sample(list(COLOURS), rng.randint(3, 5))
    heights = rng.sample(range(8, 84, 8), len(colours))
    image = Image.new("RGB", (96, 96), BACKGROUNDS[rng.choice(list(BACKGROUNDS))])
    pen, width = ImageDraw.Draw(image), 96 // len(colours)
    for k, (colour, height) in enumerate(zip(colours, heights, strict=True)):
        pen.rectangle((k * width + 3, 92 - height, (k + 1) * width - 4, 92), fill=COLOURS[colour])
    highest = rng.random() < 0.5
    wanted = colours[heights.index(max(heights) if highest else min(heights))]
    question = f"What colour is the {'highest' if highest else 'lowest'} bar?"
    return Conversation((question,), (image,)), "chart", ((wanted,),), None


def _task(name: str, about: str, score: Scorer, place: int, drawn_by: Drawn, max_new_tokens: int = 160) -> Task:
    def samples(frames: int) -> Iterator[Sample]:
        for index in count_from(FIRST + ROOM * place):
            conversation, category, references, what = drawn_by(seeded("heldout", index), frames)
            yield Sample(str(index), conversation, category, references, what)

    return Task(name, about, True, score, max_new_tokens, draw=samples)


def _texts(frames: int) -> Iterator[Sample]:
    for index in count_from(FIRST_TEXT):
        text = example(index, "heldout")
        yield Sample(str(index), Conversation((text.prompt,)), text.kind, about=text)


TASKS = (
    _task("scenes-captions", "drawn: captions of one image", drawn.objects, 0, _caption),
    _task("scenes-questions", "drawn: questions about an image", drawn.questions, 1, _asking(None), 64),
    _task("scenes-reading", "drawn: the words and numbers on a sign", drawn.questions, 2, _asking("text"), 64),
    _task("scenes-counting", "drawn: how many", drawn.questions, 3, _asking("count"), 64),
    _task("scenes-charts", "drawn: bar charts, which the embedded models do not know", drawn.colour, 4, _chart, 64),
    _task("scenes-turns", "drawn: a caption, then two questions", drawn.questions, 5, _turns),
    _task("scenes-images", "drawn: two or three images at once", drawn.objects, 6, _several),
    _task("scenes-video", "drawn: captions of clips", drawn.events, 7, _video),
    Task("texts", "generated: sums, word problems, stories, programs", False, drawn.generated, 256, draw=_texts),
)
