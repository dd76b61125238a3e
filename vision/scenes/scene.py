"""Scenes as plain data, and their random sampling.

A scene is a 3 x 3 grid of cells with at most one object each, on a plain background, and perhaps a sign: up to six
characters in one band of slots. A clip is an initial scene with events over a time from 0 to 1.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mmspec.vision.scenes.vocabulary import BACKGROUNDS, CHARACTERS, COLOURS, GRID, MAX_SIGN, SHAPES, SIZES, WORDS

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Item:
    """One object. `extent`, `dx`, `dy` are in pixels at scale 1; `row` and `col` may be fractions while it moves."""

    shape: str
    colour: str
    size: str
    row: float
    col: float
    extent: int
    dx: int = 0
    dy: int = 0

    @property
    def cell(self) -> tuple[int, int]:
        """(row, column) of the object's cell."""
        return round(self.row), round(self.col)


@dataclass(frozen=True)
class Sign:
    """A line of characters. `band` is the patch row 0..5, `slot` the patch column of the first character."""

    text: str
    band: int
    slot: int
    offsets: tuple[tuple[int, int], ...]

    @property
    def row(self) -> int:
        """Grid row 0..2 of the sign."""
        return self.band // 2


@dataclass(frozen=True)
class Scene:
    """Objects in reading order, a background and an optional sign."""

    background: str
    items: tuple[Item, ...]
    sign: Sign | None = None


def seeded(split: str, index: int) -> random.Random:
    """Returns the random generator of example `index` of a split; the splits share no seed.

    Raises:
        ValueError: `split` is neither "train" nor "heldout".
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}: received {split!r}")
    return random.Random(2 * index + SPLITS.index(split))


def sample_item(rng: random.Random, row: int, col: int) -> Item:
    """Samples an object with a random offset within its cell."""
    size = rng.choice(tuple(SIZES))
    extent = rng.randint(*SIZES[size])
    slack = 5 if size == "small" else 2
    return Item(
        shape=rng.choice(SHAPES),
        colour=rng.choice(tuple(COLOURS)),
        size=size,
        row=row,
        col=col,
        extent=extent,
        dx=rng.randint(-slack, slack),
        dy=rng.randint(-slack, slack),
    )


def sample_text(rng: random.Random) -> str:
    """Samples a sign's text: random letters, a word, or a number without leading zero."""
    kind = rng.random()
    if kind < 0.35:
        return "".join(rng.choice(CHARACTERS[:26]) for _ in range(rng.randint(2, MAX_SIGN)))
    if kind < 0.75:
        return rng.choice(WORDS)
    digits = rng.randint(1, 4)
    low = 10 ** (digits - 1) if digits > 1 else 0
    return str(rng.randint(low, 10**digits - 1))


def sample_sign(rng: random.Random, band: int, text: str | None = None) -> Sign:
    """Samples a sign in patch row `band`, with random offsets of the line and of each character by up to a pixel."""
    text = sample_text(rng) if text is None else text
    slot = rng.randint(0, MAX_SIGN - len(text))
    line = rng.choice((-1, 0, 0, 1))
    offsets = tuple((rng.choice((-1, 0, 0, 1)), line) for _ in text)
    return Sign(text, band, slot, offsets)


def sample_scene(rng: random.Random, sign_share: float = 0.4) -> Scene:
    """Samples a scene of 1-5 objects, or with a sign 0-5 objects, none in the sign's grid row."""
    background = rng.choice(tuple(BACKGROUNDS))
    sign = sample_sign(rng, rng.randrange(2 * GRID)) if rng.random() < sign_share else None
    cells = [(r, c) for r in range(GRID) for c in range(GRID) if sign is None or r != sign.row]
    count = rng.randint(0 if sign and rng.random() < 0.3 else 1, 5)
    chosen = sorted(rng.sample(cells, count))
    return Scene(background, tuple(sample_item(rng, r, c) for r, c in chosen), sign)


def sample_dense(rng: random.Random) -> tuple[Scene, tuple[Sign, ...]]:
    """Samples a crowded scene for the tower: each grid row has objects or two lines of characters."""
    background = rng.choice(tuple(BACKGROUNDS))
    items: list[Item] = []
    signs: list[Sign] = []
    for row in range(GRID):
        if rng.random() < 0.45:
            for band in (2 * row, 2 * row + 1):
                text = "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(3, MAX_SIGN)))
                signs.append(sample_sign(rng, band, text))
        else:
            items += [sample_item(rng, row, col) for col in range(GRID) if rng.random() < 0.9]
    return Scene(background, tuple(items)), tuple(signs)
