"""Words and phrases of captions, and how a wording is sampled.

The content of a scene determines a preferred wording; the writer uses it most often and otherwise samples one. So the
most likely wording differs between scenes, and no caption is deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from vision.scenes.scene import Item, Scene, Sign
from vision.scenes.vocabulary import BACKGROUNDS, GRID

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
    """Samples the wordings of one caption."""

    rng: random.Random
    preferred: int
    """Number of the preferred wording, modulo the number of options."""
    preference: float = 0.6
    """Probability of the preferred wording; otherwise one is sampled uniformly."""
    sizes: bool = True
    """Whether objects are named with their size."""

    def pick(self, options: Sequence[T]) -> T:
        """Sample an option, most often the preferred one."""
        if self.rng.random() < self.preference:
            return options[self.preferred % len(options)]
        return self.rng.choice(options)

    def name(self, item: Item, sized: bool | None = None) -> str:
        """An object without an article, such as "tiny red plus sign"."""
        words = [self.pick(COLOUR_WORDS[item.colour]), self.pick(SHAPE_WORDS[item.shape])]
        if self.sizes if sized is None else sized:
            words.insert(0, self.pick(SIZE_WORDS[item.size]))
        return " ".join(words)

    def a(self, item: Item, sized: bool | None = None) -> str:
        """An object with its indefinite article."""
        return with_article(self.name(item, sized))

    def where(self, cell: tuple[int, int]) -> str:
        """A phrase for a grid cell."""
        return self.pick(POSITIONS[cell])


def with_article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def plural(noun: str) -> str:
    """The noun's plural."""
    return noun + ("es" if noun.endswith("s") else "s")


def capital(text: str) -> str:
    """The text with its first letter capitalised."""
    return text[:1].upper() + text[1:]


def preferred_wording(scene: Scene) -> int:
    """Number of a scene's preferred wording, computed from visible features."""
    first = scene.items[0].shape if scene.items else ""
    return tuple(BACKGROUNDS).index(scene.background) + len(scene.items) + len(first)


def sign_kind(sign: Sign) -> str:
    """The kind of a sign's text: "number" or "word"."""
    return "number" if sign.text.isdigit() else "word"


def in_reading_order(items: Sequence[Item]) -> list[Item]:
    """Sorted row by row, from left to right."""
    return sorted(items, key=lambda item: item.cell)


def in_column_order(items: Sequence[Item]) -> list[Item]:
    """Sorted column by column, from top to bottom."""
    return sorted(items, key=lambda item: (item.cell[1], item.cell[0]))


def neighbours(items: Sequence[Item]) -> list[tuple[Item, str, Item]]:
    """Pairs in adjacent cells: (a, "left" | "above", b) means that a is left of b or above b."""
    by_cell = {item.cell: item for item in items}
    pairs = []
    for item in items:
        row, col = item.cell
        for relation, cell in (("left", (row, col + 1)), ("above", (row + 1, col))):
            if max(cell) < GRID and cell in by_cell:
                pairs.append((item, relation, by_cell[cell]))
    return pairs


def distinct(item: Item, items: Sequence[Item]) -> bool:
    """Whether no other object has the same colour and shape."""
    return sum(other.colour == item.colour and other.shape == item.shape for other in items) == 1
