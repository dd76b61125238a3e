"""The embedded suite: held-out scenes, clips and texts that the package generates, without files or network.

``mmspec.eval.harness.prompts`` lists the held-out indices; these tasks use those from ``FIRST_INDEX``,
``INDICES_PER_TASK`` each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count as count_from
from statistics import mean

from PIL import Image, ImageDraw

from mmspec.eval.harness.prompts import Conversation, video
from mmspec.eval.suite.sample import Answered, Sample, Scorer
from mmspec.eval.suite.tasks.task import EvalTask
from mmspec.ssm.texts import correct, example
from mmspec.vision.scenes.clips import sample_clip
from mmspec.vision.scenes.conversations import BOTH, DESCRIBE, VIDEO, describe_prompt, several_images
from mmspec.vision.scenes.drawing import picture
from mmspec.vision.scenes.questions import Question, ask
from mmspec.vision.scenes.reading import read_events, read_objects, read_sign
from mmspec.vision.scenes.scene import Scene, sample_scene, seeded
from mmspec.vision.scenes.vocabulary import BACKGROUNDS, COLOURS
from mmspec.vision.training.accuracy import events_of, is_right


def objects(answered: Sequence[Answered]) -> dict[str, float]:
    """Shares of objects with correct colour, shape and position, of signs read, and of entirely correct captions.

    ``metadata`` is the scene.
    """
    right = total = signs = read = whole = 0
    for sample, answers in answered:
        scene: Scene = sample.metadata
        mentions: Counter[object] = Counter((item.colour, item.shape, item.cell) for item in read_objects(answers[-1]))
        drawn: Counter[object] = Counter((item.colour, item.shape, item.cell) for item in scene.items)
        good = (drawn & mentions).total()
        legible = scene.sign is None or read_sign(answers[-1]) == scene.sign.text
        right, total = right + good, total + len(scene.items)
        signs, read = signs + (scene.sign is not None), read + (scene.sign is not None and legible)
        whole += legible and drawn == mentions
    return {
        "objects right": right / max(total, 1),
        "signs right": read / max(signs, 1),
        "whole captions": whole / len(answered),
    }


def questions(answered: Sequence[Answered]) -> dict[str, float]:
    """Share of correct answers. ``metadata`` lists the question of each turn, or None."""
    right = [
        is_right(question, answer)
        for sample, answers in answered
        for question, answer in zip(sample.metadata, answers, strict=True)
        if isinstance(question, Question)
    ]
    return {"accuracy": mean(map(float, right))}


def events(answered: Sequence[Answered]) -> dict[str, float]:
    """Share of a clip's events that its caption mentions. ``metadata`` is the clip."""
    right = [
        event in mentioned
        for sample, answers in answered
        for mentioned in [read_events(answers[0])]
        for event in events_of(sample.metadata)
    ]
    return {"events right": mean(map(float, right))}


def generated(answered: Sequence[Answered]) -> dict[str, float]:
    """Share of correct answers. ``metadata`` is the example of ``mmspec.ssm.texts``."""
    return {"accuracy": mean(float(correct(sample.metadata, answers[0])) for sample, answers in answered)}


def colour(answered: Sequence[Answered]) -> dict[str, float]:
    """Share of answers that name the reference colour and no other."""
    right = [
        [word for word in COLOURS if word in answers[0].lower()] == list(sample.references[0])
        for sample, answers in answered
    ]
    return {"accuracy": mean(map(float, right))}


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
    _task("scenes-captions", "drawn: captions of one image", objects, 0, _caption),
    _task("scenes-questions", "drawn: questions about an image", questions, 1, _question_sampler(None), 64),
    _task("scenes-reading", "drawn: words and numbers on a sign", questions, 2, _question_sampler("text"), 64),
    _task("scenes-counting", "drawn: counting questions", questions, 3, _question_sampler("count"), 64),
    _task("scenes-charts", "drawn: bar charts, unknown to the embedded models", colour, 4, _chart, 64),
    _task("scenes-turns", "drawn: a caption, then two questions", questions, 5, _turns),
    _task("scenes-images", "drawn: two or three images at once", objects, 6, _several),
    _task("scenes-video", "drawn: captions of clips", events, 7, _video),
    EvalTask("texts", "generated: sums, word problems, stories, programs", False, generated, 256, draw=_texts),
)
