"""Questions about scenes and their answers, each with the key that a correct answer contains."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from mmspec.vision.scenes.scene import Item, Scene
from mmspec.vision.scenes.vocabulary import COLOURS, GRID, SHAPES
from mmspec.vision.scenes.wording import NUMBERS, POSITIONS, distinct, neighbours, plural, sign_kind, with_article


@dataclass(frozen=True)
class Question:
    """A question about a scene.

    Attributes:
        kind: one of `KINDS`.
        question, answer: as texts.
        key: what any correct answer contains: a colour, shape, size, background, number word, "yes" or "no", the sign's
            text, a cell as "row,col", or "" for nothing.
    """

    kind: str
    question: str
    answer: str
    key: str


def ask(scene: Scene, rng: random.Random, kind: str | None = None) -> Question | None:
    """Returns a random question of a kind (None: of any), or None if the scene allows none."""
    if kind is None:
        kind = rng.choice(KINDS)
    return _ASKERS[kind](scene, rng)


def _pick_distinct(scene: Scene, rng: random.Random) -> Item | None:
    items = [item for item in scene.items if distinct(item, scene.items)]
    return rng.choice(items) if items else None


def _colour(scene: Scene, rng: random.Random) -> Question | None:
    items = [item for item in scene.items if sum(other.shape == item.shape for other in scene.items) == 1]
    if not items:
        return None
    item = rng.choice(items)
    question = rng.choice((f"What colour is the {item.shape}?", f"Which colour does the {item.shape} have?"))
    answer = rng.choice((f"It is {item.colour}.", f"The {item.shape} is {item.colour}."))
    return Question("colour", question, answer, item.colour)


def _shape(scene: Scene, rng: random.Random) -> Question:
    cells = [(row, col) for row in range(GRID) for col in range(GRID)]
    if scene.sign is not None:
        cells = [cell for cell in cells if cell[0] != scene.sign.row]
    if scene.items and rng.random() < 0.8:
        cells = [item.cell for item in scene.items]
    cell = rng.choice(cells)
    item = next((item for item in scene.items if item.cell == cell), None)
    place = rng.choice(POSITIONS[cell])
    question = rng.choice((f"What is {place}?", f"What can you see {place}?", f"Which shape is {place}?"))
    if item is None:
        return Question("shape", question, rng.choice(("Nothing is there.", "There is nothing there.")), "")
    thing = with_article(f"{item.colour} {item.shape}")
    return Question("shape", question, rng.choice((f"It is {thing}.", f"There is {thing} {place}.")), item.shape)


def _position(scene: Scene, rng: random.Random) -> Question | None:
    item = _pick_distinct(scene, rng)
    if item is None:
        return None
    name = f"the {item.colour} {item.shape}"
    question = rng.choice((f"Where is {name}?", f"In which part of the picture is {name}?"))
    place = rng.choice(POSITIONS[item.cell])
    answer = rng.choice((f"It is {place}.", f"The {item.colour} {item.shape} is {place}."))
    return Question("position", question, answer, f"{item.cell[0]},{item.cell[1]}")


def _size(scene: Scene, rng: random.Random) -> Question | None:
    item = _pick_distinct(scene, rng)
    if item is None:
        return None
    name = f"the {item.colour} {item.shape}"
    question = rng.choice((f"Is {name} large or small?", f"What size is {name}?"))
    return Question(
        "size", question, rng.choice((f"It is {item.size}.", f"{name} is {item.size}.".capitalize())), item.size
    )


def _count(scene: Scene, rng: random.Random) -> Question:
    kind = rng.random()
    if kind < 0.4:
        count, thing = len(scene.items), rng.choice(("objects", "shapes"))
    elif kind < 0.7:
        colours = [item.colour for item in scene.items] * 2 + list(COLOURS)
        colour = rng.choice(colours)
        count, thing = sum(item.colour == colour for item in scene.items), f"{colour} objects"
    else:
        shape = rng.choice([item.shape for item in scene.items] * 2 + list(SHAPES))
        count, thing = sum(item.shape == shape for item in scene.items), plural(shape)
    question = rng.choice((f"How many {thing} are there?", f"How many {thing} can you count?"))
    number = NUMBERS[count]
    verb = "is" if count == 1 else "are"
    answer = rng.choice((f"There {verb} {number}.", f"I count {number}."))
    return Question("count", question, answer, number)


def _text(scene: Scene, rng: random.Random) -> Question | None:
    if scene.sign is None:
        if rng.random() < 0.7:
            return None
        question = rng.choice(("Is there any text?", "What does the sign say?"))
        return Question("text", question, "There is no text.", "")
    question = rng.choice(
        (
            "What does the sign say?",
            "Read the text.",
            "What is written here?",
            "What does the text say?",
            "Read the sign.",
        )
    )
    kind = sign_kind(scene.sign)
    text = scene.sign.text
    return Question("text", question, rng.choice((f'It says "{text}".', f'The {kind} is "{text}".')), text)


def _relation(scene: Scene, rng: random.Random) -> Question | None:
    pairs = neighbours(scene.items)
    if not pairs:
        return None
    a, relation, b = rng.choice(pairs)
    if rng.random() < 0.5:
        a, b, relation = b, a, {"left": "right", "above": "below"}[relation]
    if not distinct(b, scene.items):
        return None
    side = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}[relation]
    thing = with_article(f"{a.colour} {a.shape}")
    question = f"What is {side} the {b.colour} {b.shape}?"
    return Question(
        "relation", question, rng.choice((f"It is {thing}.", f"There is {thing} {side} it.")), f"{a.colour} {a.shape}"
    )


def _yes_no(scene: Scene, rng: random.Random) -> Question | None:
    if scene.items and rng.random() < 0.5:
        item = rng.choice(scene.items)
        thing, truth = f"{item.colour} {item.shape}", True
    else:
        colours = [item.colour for item in scene.items] * 2 + list(COLOURS)
        shapes = [item.shape for item in scene.items] * 2 + list(SHAPES)
        colour, shape = rng.choice(colours), rng.choice(shapes)
        thing, truth = f"{colour} {shape}", any((item.colour, item.shape) == (colour, shape) for item in scene.items)
    question = rng.choice((f"Is there {with_article(thing)}?", f"Can you see {with_article(thing)}?"))
    answer = f"Yes, there is {with_article(thing)}." if truth else f"No, there is no {thing}."
    return Question("yes/no", question, answer, "yes" if truth else "no")


def _background(scene: Scene, rng: random.Random) -> Question:
    question = rng.choice(("What colour is the background?", "Which colour does the background have?"))
    answer = rng.choice((f"The background is {scene.background}.", f"It is {scene.background}."))
    return Question("background", question, answer, scene.background)


_ASKERS: dict[str, Callable[[Scene, random.Random], Question | None]] = {
    "colour": _colour,
    "shape": _shape,
    "position": _position,
    "size": _size,
    "count": _count,
    "text": _text,
    "relation": _relation,
    "yes/no": _yes_no,
    "background": _background,
}

KINDS = tuple(_ASKERS)
