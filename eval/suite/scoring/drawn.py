"""Scorers of the embedded suite, by the generated scene, clip or text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean

from mmspec.eval.suite.sample import Answered
from mmspec.ssm.texts import correct
from mmspec.vision.scenes.questions import Question
from mmspec.vision.scenes.reading import read_events, read_objects, read_sign
from mmspec.vision.scenes.scene import Scene
from mmspec.vision.scenes.vocabulary import COLOURS
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
