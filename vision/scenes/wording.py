"""Words and phrases of captions, and the choice among synonyms.

Each scene has a habit, a number determined by its content, that selects the preferred synonyms. Captions use them most
often, but not always: they vary between scenes even under greedy decoding, and no caption is certain.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mmspec.vision.scenes.scene import Item, Scene, Sign
from mmspec.vision.scenes.vocabulary import BACKGROUNDS, GRID

T = TypeVar("T")

SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "disc"),
    "square": ("square",),
    "triangle": ("triangle",),
    "star": ("star",),
    "cross": ("cross", "plus sign"),
    "diamond": ("diamond",),
    "ring": ("ring", "hoop"),
}

COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red",),
    "orange": ("orange",),
    "yellow": ("yellow",),
    "green": ("green",),
    "cyan": ("cyan", "turquoise"),
    "blue": ("blue",),
    "purple": ("purple", "violet"),
    "pink": ("pink",),
}

SIZE_WORDS: dict[str, tuple[str, ...]] = {"small": ("small", "little", "tiny"), "large": ("large", "big")}

NUMBERS = ("zero", "one", "two", "three", "four", "five")

POSITIONS: dict[tuple[int, int], tuple[str, ...]] = {
    (0, 0): ("in the top left corner", "at the top left", "in the upper left"),
    (0, 1): ("at the top centre", "in the top middle", "in the upper middle"),
    (0, 2): ("in the top right corner", "at the top right", "in the upper right"),
    (1, 0): ("on the left side", "at the middle left", "halfway down on the left"),
    (1, 1): ("in the centre", "in the middle", "at the very centre"),
    (1, 2): ("on the right side", "at the middle right", "halfway down on the right"),
    (2, 0): ("in the bottom left corner", "at the bottom left", "in the lower left"),
    (2, 1): ("at the bottom centre", "in the bottom middle", "in the lower middle"),
    (2, 2): ("in the bottom right corner", "at the bottom right", "in the lower right"),
}

ROWS = (
    ("at the top", "along the top"),
    ("across the middle", "in the middle row"),
    ("at the bottom", "along the bottom"),
)


@dataclass(frozen=True)
class Writer:
    """Chooses among wordings for one caption."""

    rng: random.Random
    habit: int
    loyalty: float = 0.6
    """Probability of following the habit instead of choosing uniformly."""
    sizes: bool = True
    """Whether names of objects include their size."""

    def pick(self, options: Sequence[T]) -> T:
        """Returns one of the options, most often the habit's."""
        if self.rng.random() < self.loyalty:
            return options[self.habit % len(options)]
        return self.rng.choice(options)

    def name(self, item: Item, sized: bool | None = None) -> str:
        """Returns an object's name without article, such as "tiny red plus sign"."""
        words = [self.pick(COLOUR_WORDS[item.colour]), self.pick(SHAPE_WORDS[item.shape])]
        if self.sizes if sized is None else sized:
            words.insert(0, self.pick(SIZE_WORDS[item.size]))
        return " ".join(words)

    def a(self, item: Item, sized: bool | None = None) -> str:
        """Returns an object's name with its indefinite article."""
        return with_article(self.name(item, sized))

    def where(self, cell: tuple[int, int]) -> str:
        """Returns a phrase for a grid cell."""
        return self.pick(POSITIONS[cell])


def with_article(noun: str) -> str:
    """Prepends "a" or "an"."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def scene_habit(scene: Scene) -> int:
    """Returns the habit of a scene, which a model can derive from the image."""
    first = scene.items[0].shape if scene.items else ""
    return tuple(BACKGROUNDS).index(scene.background) + len(scene.items) + len(first)


def sign_kind(sign: Sign) -> str:
    """Returns "number" or "word" for a sign's text."""
    return "number" if sign.text.isdigit() else "word"


def in_reading_order(items: Sequence[Item]) -> list[Item]:
    """Sorts objects row by row, each from left to right."""
    return sorted(items, key=lambda item: item.cell)


def in_column_order(items: Sequence[Item]) -> list[Item]:
    """Sorts objects column by column, each from top to bottom."""
    return sorted(items, key=lambda item: (item.cell[1], item.cell[0]))


def neighbours(items: Sequence[Item]) -> list[tuple[Item, str, Item]]:
    """Returns adjacent pairs: (a, "left", b) means that a is left of b, (a, "above", b) that a is above b."""
    by_cell = {item.cell: item for item in items}
    pairs = []
    for item in items:
        row, col = item.cell
        for relation, cell in (("left", (row, col + 1)), ("above", (row + 1, col))):
            if max(cell) < GRID and cell in by_cell:
                pairs.append((item, relation, by_cell[cell]))
    return pairs


def distinct(item: Item, items: Sequence[Item]) -> bool:
    """Returns whether an object is the only one with its colour and shape."""
    return sum(other.colour == item.colour and other.shape == item.shape for other in items) == 1
