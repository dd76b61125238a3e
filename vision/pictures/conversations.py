"""Training conversations about composed pictures: what they show, where, and what is not in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from mmspec.vision.pictures.compose import BACKGROUNDS, Composed, Placed, background
from mmspec.vision.pictures.library import Picture
from mmspec.vision.pictures.nouns import ANIMALS, Noun, article, classes, general
from mmspec.vision.scenes.conversations import BOTH, ORDINALS, DrawnConversation, casual, describe_prompt
from mmspec.vision.scenes.wording import NUMBERS

WEAK, STRONG = (4.0, 6.0), (8.0, 14.0)
"""Strengths of an imagined class about which captions are cautious, and certain."""


def thing(placed: Placed) -> Noun:
    """What is to be said about a thing: the class that is imagined in its place, or what is drawn."""
    return classes()[placed.imagined[0]] if placed.imagined else placed.picture.noun


def unsure(placed: Placed) -> bool:
    """Whether an imagined class is too weak to be certain of."""
    return placed.imagined is not None and placed.imagined[1] <= WEAK[1]


def named(noun: Noun, cautious: bool = False) -> str:
    """Returns "a golden retriever, a kind of dog", or cautiously "an animal, perhaps a golden retriever"."""
    name, wide = article(noun.name), general(noun.kind)
    if cautious and wide not in noun.name.lower():
        return f"{article(wide)}, perhaps {name}"
    if noun.kind in noun.name.lower() or noun.kind == "thing":
        return name
    return f"{name}, a kind of {noun.kind}"


def caption(picture: Composed) -> str:
    """Returns a description of one to three sentences."""
    things = picture.things
    if not things:
        return {
            "noise": "The picture shows an irregular pattern. I cannot make out any object in it.",
            "text": "The picture shows lines of text, which I cannot read.",
            "gradient": "The picture shows colours that blend into each other. There is no object in it.",
            "texture": "The picture shows blurred patches of colour. I cannot make out any object in it.",
        }.get(picture.background, f"The picture shows a plain {picture.colour} surface. There is no object on it.")
    behind = f"The background is {picture.colour}." if picture.colour else "The background has several colours."
    if len(things) == 1:
        [one] = things
        shown = f"The picture shows {named(thing(one), unsure(one))}."
        if one.picture.is_photograph:
            return f"{shown} It is a photograph."
        where = "It fills the picture." if one.size > 0.85 else f"It is {one.place}."
        return f"{shown} {where} {behind}"
    listed = [f"{article(thing(x).name)} {x.place}" for x in sorted(things, key=lambda x: (round(2 * x.y), x.x))]
    return f"The picture shows {NUMBERS[len(things)]} things: {', '.join(listed[:-1])} and {listed[-1]}. {behind}"


class Pictures:
    """Draws conversations about pictures.

    Args:
        library: named pictures; those that are held out are used in held-out conversations only.
        held_out: draw from the held-out pictures.
    """

    def __init__(self, library: Sequence[Picture], held_out: bool = False) -> None:
        self.library = [picture for picture in library if picture.held_out == held_out]
        self._by_source: dict[str, list[Picture]] = {}
        for picture in self.library:
            self._by_source.setdefault(picture.source, []).append(picture)
        photographs = self._by_source.get("photographs", [])
        self._views = [picture for picture in photographs if general(picture.noun.kind) in ("landscape", "building")]

    def one(self, rng: random.Random) -> DrawnConversation:
        """One picture: a caption, then questions; or questions alone."""
        at = rng.random()
        picture = self._nothing(rng) if at < 0.12 else self._several(rng) if at < 0.3 else self._single(rng)
        turns = []
        if rng.random() < 0.8:
            turns.append((casual(describe_prompt(rng), rng), caption(picture)))
        turns += self._questions(picture, rng, rng.choice((0, 1, 2, 2)) if turns else 3)
        return DrawnConversation((picture,), tuple(turns or [(describe_prompt(rng), caption(picture))]))

    def imagined(self, rng: random.Random) -> DrawnConversation:
        """One picture whose thing has the features of one of a thousand classes."""
        strength = rng.uniform(*(WEAK if rng.random() < 0.2 else STRONG))
        picture = self._single(rng, (rng.randrange(len(classes())), strength))
        turns = [(casual(describe_prompt(rng), rng), caption(picture))] if rng.random() < 0.8 else []
        turns += self._questions(picture, rng, rng.choice((0, 1, 2)) if turns else 2)
        return DrawnConversation((picture,), tuple(turns))

    def both(self, rng: random.Random) -> DrawnConversation:
        """Two or three pictures of one thing each."""
        pictures = [self._single(rng) for _ in range(rng.choice((2, 2, 3)))]
        told = [
            f"The {ordinal} picture shows {article(thing(p.things[0]).name)}."
            for ordinal, p in zip(ORDINALS, pictures, strict=False)
        ]
        turns = [(casual(rng.choice(BOTH), rng), " ".join(told))]
        which = rng.randrange(len(pictures))
        turns.append(
            (f"What is in the {ORDINALS[which]} picture?", f"It is {named(thing(pictures[which].things[0]))}.")
        )
        return DrawnConversation(tuple(pictures), tuple(turns))

    def clip(self, rng: random.Random, frames: int = 4) -> DrawnConversation:
        """Frames in which a thing moves, comes closer, goes away, stays, or gives way to another."""
        first = self._single(rng, size=(0.35, 0.5))
        [one], name = first.things, article(thing(first.things[0]).name)
        event = rng.choice(("left", "right", "closer", "away", "still", "change"))
        steps = [k / (frames - 1) for k in range(frames)]
        if event in ("left", "right"):
            xs = [0.2 + 0.6 * (s if event == "right" else 1 - s) for s in steps]
            moved = [Placed(one.picture, x, one.y, one.size, one.look) for x in xs]
            told = f"It moves to the {event}."
        elif event in ("closer", "away"):
            sizes = [0.25 + 0.65 * (s if event == "closer" else 1 - s) for s in steps]
            moved = [Placed(one.picture, 0.5, 0.5, size, one.look) for size in sizes]
            told = "It comes closer." if event == "closer" else "It goes away."
        elif event == "still":
            moved, told = [one] * frames, "It does not move."
        else:
            other = self._single(rng, size=(0.35, 0.7)).things[0]
            moved = [one if 2 * k < frames else other for k in range(frames)]
            told = f"Then there is {article(thing(other).name)}."
        scenes = tuple(replace(first, things=(placed,)) for placed in moved)
        return DrawnConversation(
            scenes, ((casual(describe_prompt(rng, of_video=True), rng), f"The clip shows {name}. {told}"),)
        )

    def _pick(self, rng: random.Random, photographs: bool = False) -> Picture:
        sources = [name for name in sorted(self._by_source) if photographs or name != "photographs"]
        return rng.choice(self._by_source[rng.choice(sources)])

    def _single(
        self,
        rng: random.Random,
        imagined: tuple[int, float] | None = None,
        size: tuple[float, float] | None = None,
    ) -> Composed:
        picture = self._pick(rng, photographs=size is None)
        if picture.is_photograph:
            placed = Placed(picture, 0.5, 0.5, 1.0, rng.getrandbits(31), imagined)
            return Composed((placed,), "photograph")
        extent = rng.uniform(*(size or ((0.86, 1.1) if rng.random() < 0.55 else (0.35, 0.8))))
        slack = max(0.0, (1 - extent) / 2)
        x, y = (0.5 + slack * rng.choice((-1, 0, 0, 1)) * rng.uniform(0.7, 1) for _ in range(2))
        return self._before(rng, Placed(picture, x, y, extent, rng.getrandbits(31), imagined))

    def _several(self, rng: random.Random) -> Composed:
        cells = [(x, y) for x in (0.22, 0.78) for y in (0.22, 0.78)]
        chosen = rng.choice(([(0.25, 0.5), (0.75, 0.5)], [(0.25, 0.5), (0.75, 0.5)], rng.sample(cells, 3), cells))
        things = [Placed(self._pick(rng), x, y, rng.uniform(0.36, 0.48), rng.getrandbits(31)) for x, y in chosen]
        return self._before(rng, *things)

    def _before(self, rng: random.Random, *things: Placed) -> Composed:
        if self._views and rng.random() < 0.35:
            return Composed(things, "photograph", rng.getrandbits(31), rng.choice(self._views))
        return Composed(things, background(rng), rng.getrandbits(31))

    def _nothing(self, rng: random.Random) -> Composed:
        name = rng.choice((f"plain {rng.choice(list(BACKGROUNDS))}", "noise", "text", "gradient", "texture"))
        return Composed((), name, rng.getrandbits(31))

    def _questions(self, picture: Composed, rng: random.Random, count: int) -> list[tuple[str, str]]:
        if not picture.things:
            return [("What is it?", caption(picture))] if count else []
        return [self._question(picture, rng) for _ in range(count)]

    def _question(self, picture: Composed, rng: random.Random) -> tuple[str, str]:
        one = rng.choice(picture.things)
        noun, many = thing(one), len(picture.things)
        kind = rng.random()
        if many == 1 and kind < 0.4:
            asked = [
                "What is it?",
                "What is this?",
                "What do you see?",
                "What is shown?",
                "What is the main thing in the picture?",
            ]
            if noun.kind in ANIMALS:
                asked += ["What animal is this?", "Which animal is in the picture?"]
            wide = general(noun.kind)
            asked += [f"What kind of {wide} is this?"] if wide not in noun.name.lower() and wide != "thing" else []
            return casual(rng.choice(asked), rng), f"It is {named(noun, unsure(one))}."
        if kind < 0.65:
            if rng.random() < 0.5:
                said = noun.name if rng.random() < 0.6 or noun.kind == "thing" else noun.kind
                return casual(
                    f"Is there {article(said)} in the picture?", rng
                ), f"Yes, there is {article(noun.name)}{'' if many == 1 else ' ' + one.place}."
            other = self._pick(rng).noun
            if other.kind not in {thing(x).kind for x in picture.things}:
                shown = " and ".join(article(thing(x).name) for x in picture.things)
                return casual(f"Is there {article(other.name)} in the picture?", rng), f"No, the picture shows {shown}."
        if kind < 0.8:
            where = "It fills the picture." if many == 1 and one.size > 0.85 else f"It is {one.place}."
            return casual(f"Where is the {noun.name}?", rng), where
        if kind < 0.9:
            return casual(
                "How many things are there?", rng
            ), f"There {'is one thing' if many == 1 else f'are {NUMBERS[many]} things'}."
        colour = f"It is {picture.colour}." if picture.colour else "It has several colours."
        return casual("What colour is the background?", rng), colour
