"""Training conversations of one or more turns about images or a video, or without any."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from mmspec.vision.scenes.captions import brief, caption, listing
from mmspec.vision.scenes.clips import ask_clip, describe_clip, sample_clip
from mmspec.vision.scenes.questions import ask
from mmspec.vision.scenes.scene import Scene, sample_scene
from mmspec.vision.scenes.vocabulary import COLOURS, SHAPES
from mmspec.vision.scenes.wording import NUMBERS, capital

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


DESCRIBE = (
    "Describe the image.",
    "Describe the picture.",
    "Describe this image.",
    "Describe this image in detail.",
    "Describe what you see.",
    "What do you see?",
    "What is in the image?",
    "What is in this picture?",
    "What does the image show?",
    "What is shown here?",
    "What can you see?",
    "Write a caption.",
    "Write a caption for this image.",
    "Caption this image.",
    "Please describe the image.",
    "Give a detailed description.",
    "Tell me about this picture.",
    "Explain what is in the image.",
)
BRIEF = (
    "Describe the image briefly.",
    "Write a short caption.",
    "Summarise the picture in one sentence.",
    "In short, what is it?",
)
LIST = ("List the objects.", "List everything.", "List all shapes with their places.", "Make a list of what you see.")
VIDEO = (
    "Describe the video.",
    "Describe this video.",
    "What happens in this video?",
    "What do you see in the video?",
    "Write a caption for the video.",
    "Describe the video in detail.",
    "What does the clip show?",
    "Caption this video.",
    "Please describe the video.",
)
ORDERED: dict[str, tuple[str, ...]] = {
    "columns": (
        "Describe the image from left to right.",
        "Describe the picture column by column.",
        "What is in the image, from left to right?",
        "Go through the picture from left to right.",
    ),
    "reversed": (
        "Describe the image from bottom to top.",
        "Describe the picture in reverse order.",
        "What is in the image, from bottom to top?",
        "Go through the picture backwards.",
    ),
}
"""Requests for a caption in a given order of objects."""
BOTH = (
    "Describe the images.",
    "Describe all images.",
    "What do the images show?",
    "What is in the images?",
    "Compare the images.",
)
ORDINALS = ("first", "second", "third")


@dataclass(frozen=True)
class DrawnConversation:
    """A conversation about drawn scenes or composed pictures, which come before the first user text.

    Attributes:
        scenes: the images, or the frames of a video; of one kind.
        turns: pairs of user text and answer.
        at_rest: no object is between cells, so the perception task has labels.
    """

    scenes: tuple[Any, ...]
    turns: tuple[tuple[str, str], ...]
    at_rest: bool = True


_ASKING = ("", "Please ", "Could you ", "Can you ", "I would like you to ", "Now ")
_VERBS = (
    "describe",
    "explain",
    "caption",
    "look at",
    "tell me about",
    "tell me what is in",
    "say what you see in",
    "write about",
)
_PICTURES = ("image", "picture", "drawing", "scene", "photo")
_FILMS = ("video", "clip", "film", "animation", "movie")
_DETAILS = ("", " in detail", " for me", " in a few sentences", " carefully", " in your own words")


def describe_prompt(rng: random.Random, of_video: bool = False) -> str:
    """Returns a request for a full description in one of some thousands of wordings."""
    if rng.random() < 0.6:
        return rng.choice(VIDEO if of_video else DESCRIBE)
    thing = f"{rng.choice(('the', 'this'))} {rng.choice(_FILMS if of_video else _PICTURES)}"
    asking = rng.choice(_ASKING)
    end = "?" if asking.startswith("C") else "."
    return capital(f"{asking}{rng.choice(_VERBS)} {thing}{rng.choice(_DETAILS)}{end}")


def casual(prompt: str, rng: random.Random) -> str:
    """Returns the prompt, sometimes without its capital letter or full stop."""
    draw = rng.random()
    if draw < 0.08:
        return prompt[0].lower() + prompt[1:]
    if draw < 0.16:
        return prompt.rstrip(".?")
    if draw < 0.2:
        return prompt[0].lower() + prompt[1:].rstrip(".?")
    return prompt


def lists_only(rng: random.Random) -> DrawnConversation:
    """One image, its list of objects in fixed wording, and up to two questions."""
    scene = sample_scene(rng, sign_share=0.5)
    turns = [(rng.choice(LIST), listing(scene)), *_questions(scene, rng, rng.randint(0, 2))]
    return DrawnConversation((scene,), tuple(turns))


def one_image(rng: random.Random) -> DrawnConversation:
    """One image: usually a caption first, then questions."""
    scene = sample_scene(rng)
    draw = rng.random()
    turns: list[tuple[str, str]] = []
    if draw < 0.08:
        order = rng.choice(tuple(ORDERED))
        turns.append((casual(rng.choice(ORDERED[order]), rng), caption(scene, rng, order)))
    elif draw < 0.7:
        turns.append((casual(describe_prompt(rng), rng), caption(scene, rng)))
    elif draw < 0.78:
        turns.append((casual(rng.choice(BRIEF), rng), brief(scene, rng)))
    elif draw < 0.86:
        turns.append((casual(rng.choice(LIST), rng), listing(scene)))
    turns += _questions(scene, rng, rng.choice((0, 1, 1, 2, 3)) if turns else 3)
    if draw > 0.97:
        turns.append((casual(describe_prompt(rng), rng), caption(scene, rng)))
    if not turns:
        turns.append((describe_prompt(rng), caption(scene, rng)))
    return DrawnConversation((scene,), tuple(turns))


def questions_only(rng: random.Random) -> DrawnConversation:
    """One image and four to seven questions without a caption."""
    while True:
        scene = sample_scene(rng)
        turns = _questions(scene, rng, rng.randint(4, 7))
        if turns:
            return DrawnConversation((scene,), tuple(turns))


def several_images(rng: random.Random) -> DrawnConversation:
    """Two or three simple images described in order, with a question about one of them."""
    scenes = tuple(_simple_scene(rng) for _ in range(rng.choice((2, 2, 3))))
    turns = []
    if rng.random() < 0.8:
        parts = []
        for ordinal, scene in zip(ORDINALS, scenes, strict=False):
            text = listing(scene)
            parts.append(f"The {ordinal} image shows {text[0].lower()}{text[1:]}")
        turns.append((casual(rng.choice(BOTH), rng), " ".join(parts)))
    which = rng.randrange(len(scenes))
    count = len(scenes[which].items)
    if rng.random() < 0.5 or not turns:
        verb = "is" if count == 1 else "are"
        turns.append((f"How many objects are in the {ORDINALS[which]} image?", f"There {verb} {NUMBERS[count]}."))
    if rng.random() < 0.4:
        background = scenes[which].background
        turns.append((f"What is the background of the {ORDINALS[which]} image?", capital(f"it is {background}.")))
    return DrawnConversation(scenes, tuple(turns))


def video(rng: random.Random, frames: int) -> DrawnConversation:
    """A clip of `frames` frames: usually its description, sometimes a question."""
    clip = sample_clip(rng)
    scenes = clip.frames(frames, rng.uniform(0, 0.06), rng.uniform(0.94, 1.0))
    turns = []
    if rng.random() < 0.75:
        turns.append((casual(describe_prompt(rng, of_video=True), rng), describe_clip(clip, rng)))
    if not turns or rng.random() < 0.4:
        turns.append(ask_clip(clip, rng))
    return DrawnConversation(tuple(scenes), tuple(turns), at_rest=False)


def words_only(rng: random.Random) -> DrawnConversation:
    """No image: one to three turns of small talk, or an invented scene."""
    if rng.random() < 0.4:
        return DrawnConversation((), (invention(rng),))
    return DrawnConversation((), tuple(small_talk(rng) for _ in range(rng.randint(1, 3))))


def _simple_scene(rng: random.Random) -> Scene:
    scene = sample_scene(rng, sign_share=0.2)
    return Scene(scene.background, scene.items[:3], scene.sign)


def _questions(scene: Scene, rng: random.Random, count: int) -> list[tuple[str, str]]:
    questions = [ask(scene, rng) for _ in range(count)]
    return [(casual(q.question, rng), q.answer) for q in questions if q is not None]
