"""Turns without an image: the model's identity, facts about shapes and colours, invented scenes."""

from __future__ import annotations

import random

from mmspec.vision.scenes.captions import caption
from mmspec.vision.scenes.scene import sample_scene
from mmspec.vision.scenes.vocabulary import COLOURS, SHAPES

SELF = "I am tiny-llava, a small model that describes drawings of coloured shapes, short texts and short videos."

_SIDES = {
    "circle": "A circle has no sides: it is round all the way.",
    "square": "A square has four sides of the same length and four corners.",
    "triangle": "A triangle has three sides and three corners.",
    "star": "A star has five points.",
    "cross": "A cross has four arms of the same length, like a plus sign.",
    "diamond": "A diamond has four sides and stands on one of its corners.",
    "ring": "A ring is a circle with a hole in the middle.",
}

_MIXED = {"orange": "red and yellow", "green": "blue and yellow", "purple": "red and blue", "pink": "red and white"}


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Returns a question without an image and its answer."""
    kind = rng.randrange(6)
    if kind == 0:
        question = rng.choice(("Who are you?", "What are you?", "Tell me about yourself.", "What is your name?"))
        return question, SELF
    if kind == 1:
        question = rng.choice(("What can you do?", "How can you help me?", "Hello!", "Hi.", "Hello, how are you?"))
        greeting = "Hello! " if question[0] == "H" and "?" not in question[:4] and "help" not in question else ""
        return question, greeting + "Show me a picture or a short video of shapes and I will describe it."
    if kind == 2:
        shape = rng.choice(SHAPES)
        question = rng.choice((f"What is a {shape}?", f"How many sides does a {shape} have?", f"Describe a {shape}."))
        return question, _SIDES[shape]
    if kind == 3:
        colour = rng.choice(tuple(_MIXED))
        question = rng.choice((f"How do I mix {colour}?", f"How do you make {colour}?"))
        return question, f"Mix {_MIXED[colour]} to get {colour}."
    if kind == 4:
        question = rng.choice(("Which colours do you know?", "What colours do you know?"))
        return question, "I know " + ", ".join(tuple(COLOURS)[:-1]) + " and pink."
    question = rng.choice(("Which shapes do you know?", "What shapes do you know?"))
    return question, "I know circles, squares, triangles, stars, crosses, diamonds and rings."


def invention(rng: random.Random) -> tuple[str, str]:
    """Returns a request to invent an image, and the caption of a random scene as its answer."""
    question = rng.choice(
        (
            "Imagine a picture and describe it.",
            "Invent a scene.",
            "Make up a picture.",
            "Write something.",
            "Tell me a story.",
        )
    )
    return question, caption(sample_scene(rng, sign_share=0.3), rng)
