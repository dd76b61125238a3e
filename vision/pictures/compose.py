"""Composition of training pictures: cut-outs on backgrounds, their places known, and pictures of nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from mmspec.vision.pictures.library import Picture

SIDE = 192
"""Pixels along a side of a composed picture."""

GRID = 6
"""Positions along a side of the vision tower's output."""

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (12, 12, 12),
    "grey": (140, 140, 140),
    "blue": (90, 140, 220),
    "green": (90, 170, 90),
    "yellow": (240, 220, 110),
    "red": (205, 70, 65),
    "brown": (140, 100, 65),
    "pink": (240, 170, 195),
    "orange": (240, 150, 60),
    "purple": (140, 90, 180),
}

PLACES: tuple[tuple[str, ...], ...] = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the middle", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)


@dataclass(frozen=True)
class Placed:
    """A thing in a picture.

    Attributes:
        picture: what is shown.
        x, y: of its centre, from 0 to 1.
        size: of its longer side, from 0 to 1.
        look: seed of flips, rotation and brightness.
        imagined: class whose pooled features replace those of the thing, and how strongly; None for what is drawn.
    """

    picture: Picture
    x: float
    y: float
    size: float
    look: int
    imagined: tuple[int, float] | None = None

    @property
    def place(self) -> str:
        """Where its centre is."""
        return PLACES[min(int(3 * self.y), 2)][min(int(3 * self.x), 2)]


@dataclass(frozen=True)
class Composed:
    """A picture to be drawn.

    Attributes:
        things: from back to front.
        background: "plain red", "gradient", "texture", "photograph", "noise" or "text".
        look: seed of the background.
        behind: the photograph of a background.
    """

    things: tuple[Placed, ...]
    background: str
    look: int = 0
    behind: Picture | None = None

    @property
    def colour(self) -> str | None:
        """Of a plain background."""
        return self.background.removeprefix("plain ") if self.background.startswith("plain ") else None

    def draw(self) -> np.ndarray:
        """Returns the pixels, uint8 (192, 192, 3)."""
        rng = np.random.default_rng(self.look)
        canvas = _cropped(self.behind, rng) if self.behind else Image.fromarray(_background(self.background, rng))
        for thing in self.things:
            _paste(canvas, thing)
        pixels = np.asarray(canvas).astype(np.float32)
        if rng.random() < 0.3:
            pixels += rng.normal(0, rng.uniform(1, 8), pixels.shape)
        return np.clip(pixels, 0, 255).astype(np.uint8)

    def mask(self) -> np.ndarray:
        """Returns the share of each position that its first thing's box covers, float32 (6, 6)."""
        steps = (np.arange(GRID) + 0.5) / GRID
        thing = self.things[0]
        half = thing.size / 2
        rows, columns = (np.abs(steps - centre) <= half + 0.5 / GRID for centre in (thing.y, thing.x))
        return np.outer(rows, columns).astype(np.float32)


def _cropped(picture: Picture, rng: np.random.Generator, least: float = 0.4) -> Image.Image:
    """A photograph, cropped to a share of each side and resized regardless of its aspect ratio."""
    image = picture.pixels().convert("RGB")
    width, height = (round(side * rng.uniform(least, 1)) for side in image.size)
    left, top = int(rng.integers(image.width - width + 1)), int(rng.integers(image.height - height + 1))
    image = image.crop((left, top, left + width, top + height)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def _paste(canvas: Image.Image, thing: Placed) -> None:
    if thing.picture.is_photograph:
        canvas.paste(_cropped(thing.picture, np.random.default_rng(thing.look), 0.75))
        return
    rng = random.Random(thing.look)
    image = thing.picture.pixels()
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.3:
        image = image.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, expand=True)
    scale = thing.size * SIDE / max(image.size)
    squeeze = rng.uniform(0.8, 1.25) if rng.random() < 0.4 else 1.0
    width, height = (
        max(round(image.width * scale * min(squeeze, 1)), 2),
        max(round(image.height * scale / max(squeeze, 1)), 2),
    )
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        factor = rng.uniform(0.75, 1.2)
        image = Image.merge(
            "RGBA",
            [*(band.point(lambda v: min(int(v * factor), 255)) for band in image.split()[:3]), image.getchannel("A")],
        )
    canvas.paste(image, (round(thing.x * SIDE - width / 2), round(thing.y * SIDE - height / 2)), image)


def _background(name: str, rng: np.random.Generator) -> np.ndarray:
    if name.startswith("plain "):
        base = np.array(BACKGROUNDS[name.removeprefix("plain ")], np.float32)
        shift = 0 if name == "plain white" else rng.normal(0, 10, 3)
        return np.broadcast_to(np.clip(base + shift, 0, 255), (SIDE, SIDE, 3)).astype(np.uint8)
    if name == "text":
        return _text(rng)
    if name == "noise":
        grain = int(rng.choice((1, 2, 4, 8)))
        small = rng.integers(0, 256, (SIDE // grain, SIDE // grain, int(rng.choice((1, 3)))))
        return np.broadcast_to(small.repeat(grain, 0).repeat(grain, 1), (SIDE, SIDE, 3)).astype(np.uint8)
    corners = rng.integers(30, 250, (2, 2, 3)).astype(np.uint8)
    if name == "texture":
        patches = rng.normal(0, rng.uniform(10, 55), (int(rng.integers(2, 10)), int(rng.integers(2, 10)), 3))
        corners = np.clip(rng.integers(40, 220, 3) + patches, 0, 255).astype(np.uint8)
    image = np.asarray(Image.fromarray(corners).resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(np.float32)
    if name == "texture":
        grain = int(rng.choice((1, 2, 3)))
        fine = rng.normal(0, rng.uniform(0, 15), (SIDE // grain, SIDE // grain, 1))
        image = (image + fine.repeat(grain, 0).repeat(grain, 1)).astype(np.float32)
    return np.clip(image, 0, 255).astype(np.uint8)


def _text(rng: np.random.Generator) -> np.ndarray:
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    size = int(rng.integers(10, 30))
    for top in range(int(rng.integers(4, 60)), SIDE - size, int(size * 1.4)):
        line = " ".join(
            "".join(chr(97 + int(c)) for c in rng.integers(0, 26, int(rng.integers(2, 9)))) for _ in range(8)
        )
        pen.text(
            (int(rng.integers(4, 12)), top), line, fill=tuple(int(v) for v in rng.integers(0, 90, 3)), font_size=size
        )
        if rng.random() < 0.15:
            break
    return np.asarray(image)


def background(rng: random.Random) -> str:
    """Draws the name of a background behind things."""
    at = rng.random()
    if at < 0.3:
        return "plain white"
    if at < 0.5:
        return f"plain {rng.choice(list(BACKGROUNDS))}"
    return "texture" if at < 0.85 else "gradient"
