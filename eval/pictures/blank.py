"""Blank pictures made by code: noise, one colour, gradients, text on white. A caption should claim no thing in them."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from mmspec.eval.pictures.picture import Picture

WIDTH, HEIGHT = 384, 288
_COLOURS = {"white": 0xFFFFFF, "black": 0x000000, "grey": 0x808080, "sky-blue": 0x87CEEB, "dark-red": 0x8B0000}
_GRADIENTS = {
    "black-to-white": (0x000000, 0xFFFFFF),
    "blue-to-white": (0x1E50C8, 0xFFFFFF),
    "red-to-yellow": (0xC81E1E, 0xFAE11E),
    "green-to-black": (0x1EA032, 0x000000),
}
_TEXTS = {"hello": "Hello", "time": "12:45", "thanks": "Thank you!", "letters": "A B C", "sum": "3 + 4 = 7"}


def blank_pictures() -> list[Picture]:
    """Twenty pictures without a thing in them; their groups are noise, colour, gradient and text."""
    images = {
        "noise": _noises(),
        "colour": {name: Image.new("RGB", (WIDTH, HEIGHT), _rgb(value)) for name, value in _COLOURS.items()},
        "gradient": _gradients(),
        "text": {name: _text(text) for name, text in _TEXTS.items()},
    }
    return [
        Picture(f"{group}-{name}", image, group=group) for group, part in images.items() for name, image in part.items()
    ]


def _rgb(value: int) -> tuple[int, int, int]:
    return value >> 16, value >> 8 & 255, value & 255


def _noises() -> dict[str, Image.Image]:
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))
    greys = Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH), dtype=np.uint8))
    faint = np.clip(rng.normal(200, 12, (HEIGHT, WIDTH, 3)), 0, 255).astype(np.uint8)
    coarse = Image.fromarray(rng.integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), dtype=np.uint8))
    return {
        "colours": colours,
        "greys": greys,
        "faint": Image.fromarray(faint),
        "blurred": colours.filter(ImageFilter.GaussianBlur(2)),
        "coarse": coarse.resize((WIDTH, HEIGHT), Image.Resampling.NEAREST),
    }


def _gradients() -> dict[str, Image.Image]:
    images = {}
    for number, (name, ends) in enumerate(_GRADIENTS.items()):
        size = (WIDTH, HEIGHT)
        first, last = (np.array(_rgb(value), float) for value in ends)
        rows, columns = np.mgrid[0 : 1 : size[1] * 1j, 0 : 1 : size[0] * 1j]
        share = (rows, columns)[number % 2][..., None]
        images[name] = Image.fromarray((first + (last - first) * share).round().astype(np.uint8))
    images["radial"] = Image.radial_gradient("L").resize((WIDTH, HEIGHT))
    return images


def _text(text: str) -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    ImageDraw.Draw(image).text(
        (WIDTH / 2, HEIGHT / 2), text, fill="black", font=ImageFont.load_default(56), anchor="mm"
    )
    return image
