"""The embedded suite: held-out scenes, clips and texts that the package generates, without files or network.

``mmspec.eval.harness.prompts`` lists the held-out indices; these tasks use those from ``FIRST_INDEX``,
``INDICES_PER_TASK`` each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count as count_from

from PIL import Image, ImageDraw

from mmspec.eval.harness.prompts import Conversation, picture, video
from mmspec.eval.suite.sample import Sample, Scorer
from mmspec.eval.suite.scoring import drawn
from mmspec.eval.suite.tasks.task import EvalTask
from mmspec.ssm.texts import example
from mmspec.vision.scenes.clips import sample_clip
from mmspec.vision.scenes.conversations import BOTH, DESCRIBE, VIDEO, describe_prompt, several_images
from mmspec.vision.scenes.questions import Question, ask
from mmspec.vision.scenes.scene import Scene, sample_scene, seeded
from mmspec.vision.scenes.vocabulary import BACKGROUNDS, COLOURS

FIRST_INDEX = 4_000_000
"""First held-out scene of these tasks."""

INDICES_PER_TASK = 100_000

FIRST_TEXT_INDEX = 6_000_000
"""First held-out text of ``texts``."""

SampleFields = tuple[Conversation, str, tuple[tuple[str, ...], ...], object]
"""Conversation, category, references and metadata of a sample."""

DrawSample = Callable[[random.Random, int], SampleFields]
"""Draws a sample, given a random generator and the frames per video."""


def _caption(rng: random.Random, frames: int) -> SampleFields:
    scene = sample_scene(rng)
    return Conversation((rng.choice(DESCRIBE),), (picture(scene),)), "captions", (), scene


def _question_sampler(kind: str | None) -> DrawSample:
    """Draws questions of one kind, or with None, of all kinds but counting and reading, which are separate tasks."""

    def draw(rng: random.Random, frames: int) -> SampleFields:
        while True:
            scene = sample_scene(rng, 1.0 if kind == "text" else 0.4)
            question = ask(scene, rng, kind)
            if question is not None and (kind or question.kind not in ("count", "text")):
                return Conversation((question.question,), (picture(scene),)), question.kind, (), [question]

    return draw


def _turns(rng: random.Random, frames: int) -> SampleFields:
    scene = sample_scene(rng)
    questions: list[Question | None] = [None]
    while len(questions) < 3:
        question = ask(scene, rng)
        if question is not None and question not in questions:
            questions.append(question)
    texts = tuple(describe_prompt(rng) if question is None else question.question for question in questions)
    return Conversation(texts, (picture(scene),)), "conversation", (), questions


def _several(rng: random.Random, frames: int) -> SampleFields:
    scenes = several_images(rng).scenes
    both = Scene("white", tuple(item for scene in scenes for item in scene.items))
    return Conversation((rng.choice(BOTH),), tuple(map(picture, scenes))), "images", (), both


def _video(rng: random.Random, frames: int) -> SampleFields:
    clip = sample_clip(rng)
    shown = video(clip.frames(frames))
    return Conversation((rng.choice(VIDEO),), videos=(shown,)), "video", (), clip


def _chart(rng: random.Random, frames: int) -> SampleFields:
    """A question about a bar chart. The embedded models were not trained on charts and answer wrongly."""
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


def _task(
    name: str, description: str, score: Scorer, number: int, draw_sample: DrawSample, max_new_tokens: int = 160
) -> EvalTask:
    def samples(frames: int) -> Iterator[Sample]:
        for index in count_from(FIRST_INDEX + INDICES_PER_TASK * number):
            conversation, category, references, metadata = draw_sample(seeded("heldout", index), frames)
            yield Sample(str(index), conversation, category, references, metadata)

    return EvalTask(name, description, True, score, max_new_tokens, draw=samples)


def _texts(frames: int) -> Iterator[Sample]:
    for index in count_from(FIRST_TEXT_INDEX):
        text = example(index, "heldout")
        yield Sample(str(index), Conversation((text.prompt,)), text.kind, metadata=text)


TASKS = (
    _task("scenes-captions", "drawn: captions of one image", drawn.objects, 0, _caption),
    _task("scenes-questions", "drawn: questions about an image", drawn.questions, 1, _question_sampler(None), 64),
    _task("scenes-reading", "drawn: words and numbers on a sign", drawn.questions, 2, _question_sampler("text"), 64),
    _task("scenes-counting", "drawn: counting questions", drawn.questions, 3, _question_sampler("count"), 64),
    _task("scenes-charts", "drawn: bar charts, unknown to the embedded models", drawn.colour, 4, _chart, 64),
    _task("scenes-turns", "drawn: a caption, then two questions", drawn.questions, 5, _turns),
    _task("scenes-images", "drawn: two or three images at once", drawn.objects, 6, _several),
    _task("scenes-video", "drawn: captions of clips", drawn.events, 7, _video),
    EvalTask("texts", "generated: sums, word problems, stories, programs", False, drawn.generated, 256, draw=_texts),
)
