"""Captions of scenes: colour, shape and position of every object, and some of sign, count, background, relations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from mmspec.vision.scenes.scene import Item, Scene, Sign
from mmspec.vision.scenes.vocabulary import COLOURS, SHAPES
from mmspec.vision.scenes.wording import (
    COLOUR_WORDS,
    NUMBERS,
    POSITIONS,
    ROWS,
    SHAPE_WORDS,
    Writer,
    capital,
    distinct,
    in_column_order,
    in_reading_order,
    neighbours,
    plural,
    scene_habit,
    sign_kind,
)

MAX_SENTENCES = 6

ORDERS: dict[str, Callable[[Sequence[Item]], list[Item]]] = {
    "rows": in_reading_order,
    "columns": in_column_order,
    "reversed": lambda items: in_reading_order(items)[::-1],
}
"""Orders of the objects in a caption."""


def caption(scene: Scene, rng: random.Random, order: str = "rows") -> str:
    """Returns a caption of 2-6 sentences that names every object once with colour, shape and position.

    The order is part of the request: with a random order, a model mixes the attributes of the objects that could come
    next.

    Args:
        scene: the scene.
        rng: of the wording.
        order: "rows" (reading order), "columns" (column by column, from the left) or "reversed" (of "rows").
    """
    writer = Writer(rng, scene_habit(scene), sizes=rng.random() < 0.7)
    body = _object_sentences(ORDERS[order](scene.items), writer)
    if scene.sign is not None:
        body.insert(writer.pick((0, len(body))), _sign_sentence(scene.sign, writer))
    extras = [_background_sentence(scene, writer)]
    if scene.items:
        extras.append(_count_sentence(scene, writer))
        extras.append(_group_sentence(scene, writer))
    relations = _relation_sentences(scene, writer)
    if relations:
        extras.append(relations[0])
    wanted = max(2 - len(body), rng.choice((0, 1, 1, 2, 2, 3)))
    wanted = min(wanted, MAX_SENTENCES - len(body), len(extras))
    chosen = rng.sample(range(len(extras)), wanted)
    opening = [k for k in chosen if k < 2][:1] if rng.random() < 0.4 else []
    closing = [k for k in chosen if k not in opening]
    return " ".join([*(extras[k] for k in opening), *body, *(extras[k] for k in closing)])


def brief(scene: Scene, rng: random.Random) -> str:
    """Returns one sentence with the number of objects or their names, and the sign."""
    writer = Writer(rng, scene_habit(scene), sizes=False)
    if not scene.items:
        start = writer.pick(("An empty", "A bare", "A plain")) + f" {scene.background} background"
    elif len(scene.items) <= 2:
        start = capital(" and ".join(writer.a(item) for item in scene.items))
    else:
        start = capital(f"{NUMBERS[len(scene.items)]} {writer.pick(('shapes', 'objects', 'coloured shapes'))}")
    if scene.items:
        start += f" on a {scene.background} background"
    if scene.sign is not None:
        start += f' with the {sign_kind(scene.sign)} "{scene.sign.text}"'
    return start + "."


def listing(scene: Scene) -> str:
    """Returns a list of all objects in reading order, and the sign: "A large red star at the top left; ..."."""
    parts = []
    for item in in_reading_order(scene.items):
        parts.append(f"a {item.size} {item.colour} {item.shape} {POSITIONS[item.cell][0]}")
    if scene.sign is not None:
        parts.append(f'the {sign_kind(scene.sign)} "{scene.sign.text}" {ROWS[scene.sign.row][0]}')
    return capital("; ".join(parts)) + "."


def _object_sentences(items: Sequence[Item], writer: Writer) -> list[str]:
    sentences = []
    at = 0
    while at < len(items):
        left = len(items) - at
        take = min(left, writer.pick((2, 1, 2))) if left <= 3 else 2
        sentences.append(_introduce(items[at : at + take], writer, first=at == 0, last=at + take == len(items)))
        at += take
    return sentences


def _introduce(items: Sequence[Item], writer: Writer, first: bool, last: bool) -> str:
    """One sentence that introduces one or two objects with their positions."""
    names = [writer.a(item) for item in items]
    places = [writer.where(item.cell) for item in items]
    if len(items) == 1:
        return _introduce_one(names[0], places[0], writer, first, last)
    forms = [
        f"{names[0]} is {places[0]} and {names[1]} is {places[1]}.",
        f"there is {names[0]} {places[0]} and {names[1]} {places[1]}.",
        f"{places[0]} there is {names[0]}, and {places[1]} there is {names[1]}.",
        f"{names[0]} can be seen {places[0]}, while {names[1]} sits {places[1]}.",
    ]
    if not first:
        forms += [
            f"next comes {names[0]} {places[0]}, then {names[1]} {places[1]}.",
            f"it also has {names[0]} {places[0]} as well as {names[1]} {places[1]}.",
        ]
    return capital(writer.pick(forms))


def _introduce_one(name: str, place: str, writer: Writer, first: bool, last: bool) -> str:
    forms = [
        f"{name} is {place}.",
        f"there is {name} {place}.",
        f"{place} sits {name}.",
        f"{place}, one can see {name}.",
        f"I can see {name} {place}.",
    ]
    if not first:
        forms.append(f"another thing here is {name} {place}.")
    if not first and last:
        forms.append(f"finally, there is {name} {place}.")
    return capital(writer.pick(forms))


def _sign_sentence(sign: Sign, writer: Writer) -> str:
    row = writer.pick(ROWS[sign.row])
    kind = sign_kind(sign)
    return capital(
        writer.pick(
            (
                f'the {kind} "{sign.text}" is written {row}.',
                f'{row} it says "{sign.text}".',
                f'there is a sign {row} that reads "{sign.text}".',
                f'a {kind} is printed {row}: "{sign.text}".',
            )
        )
    )


def _background_sentence(scene: Scene, writer: Writer) -> str:
    colour = scene.background
    return writer.pick(
        (
            f"The background is {colour}.",
            f"Everything is set on a {colour} background.",
            f"The whole picture is {colour} behind that.",
            f"All of this is in front of a {colour} backdrop.",
        )
    )


def _count_sentence(scene: Scene, writer: Writer) -> str:
    count = len(scene.items)
    noun = writer.pick(("object", "shape", "figure")) + ("s" if count > 1 else "")
    verb = "are" if count > 1 else "is"
    return writer.pick(
        (
            f"There {verb} {NUMBERS[count]} {noun} in total.",
            f"The picture shows {NUMBERS[count]} {noun}.",
            f"In all, {NUMBERS[count]} {noun} can be counted.",
        )
    )


def _group_sentence(scene: Scene, writer: Writer) -> str:
    """The number of objects of one colour or shape; if all differ, a colour or shape that is absent."""
    groups: list[str] = []
    for colour, count in Counter(item.colour for item in scene.items).items():
        if count > 1:
            groups.append(f"{capital(NUMBERS[count])} of them are {writer.pick(COLOUR_WORDS[colour])}.")
    for shape, count in Counter(item.shape for item in scene.items).items():
        if count > 1:
            groups.append(f"{capital(NUMBERS[count])} of them are {plural(writer.pick(SHAPE_WORDS[shape]))}.")
    if groups:
        return writer.rng.choice(groups)
    if writer.rng.random() < 0.5:
        absent = [colour for colour in COLOURS if all(item.colour != colour for item in scene.items)]
        return f"Nothing here is {writer.rng.choice(absent)}."
    absent = [shape for shape in SHAPES if all(item.shape != shape for item in scene.items)]
    return f"No {writer.rng.choice(absent)} is in the picture."


def _relation_sentences(scene: Scene, writer: Writer) -> list[str]:
    sentences = []
    for a, relation, b in neighbours(scene.items):
        if not (distinct(a, scene.items) and distinct(b, scene.items)):
            continue
        if writer.habit % 2:
            a, b = b, a
            relation = {"left": "right", "above": "below"}[relation]
        first, second = "the " + writer.name(a, sized=False), "the " + writer.name(b, sized=False)
        link = {
            "left": ("is to the left of", "is just left of"),
            "right": ("is to the right of", "is just right of"),
            "above": ("is above", "is directly above"),
            "below": ("is below", "is directly below"),
        }[relation]
        sentences.append(capital(f"{first} {writer.pick(link)} {second}."))
    return sentences
