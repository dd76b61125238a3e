"""Pictures to describe, with the words that a caption may name them by: photographs, blank pictures, stamps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from mmspec.errors import UserError
from mmspec.vision.pictures import library
from mmspec.vision.pictures.compose import Composed, Placed
from mmspec.vision.pictures.fetching import Package, listed_packages, located
from mmspec.vision.pictures.nouns import general

_LIST = Path(__file__).parent / "photographs.json"
WIDTH, HEIGHT = 384, 288
_COLOURS = {"white": 0xFFFFFF, "black": 0x000000, "grey": 0x808080, "sky-blue": 0x87CEEB, "dark-red": 0x8B0000}
_GRADIENTS = {
    "black-to-white": (0x000000, 0xFFFFFF),
    "blue-to-white": (0x1E50C8, 0xFFFFFF),
    "red-to-yellow": (0xC81E1E, 0xFAE11E),
    "green-to-black": (0x1EA032, 0x000000),
}
_TEXTS = {"hello": "Hello", "time": "12:45", "thanks": "Thank you!", "letters": "A B C", "sum": "3 + 4 = 7"}
_STAMP = 0.95  # size of a stamp in its picture


@dataclass(frozen=True)
class Picture:
    """A picture to describe.

    Attributes:
        name: unique within its list.
        image: anything that the target accepts.
        names: words for the main thing, singular; empty for a blank picture.
        kinds: words for its kind, or for what else is in view.
        group: of pictures that are counted together.
    """

    name: str
    image: Any
    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    group: str = ""


def photograph_packages() -> list[Package]:
    return listed_packages(_LIST)


def cached(packages: Sequence[Package]) -> tuple[list[Picture], list[str]]:
    """The photographs of packages that are in the cache, and the names of those that are missing or corrupt."""
    found, missing = located(packages)
    return [Picture(one.name, str(path), one.names, one.kinds, one.group) for one, path in found], missing


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


def held_out_stamps() -> list[Picture]:
    """The stamps on white, each with its noun; its kinds are WordNet's, and the folders it lies in ("plants/flowers").

    Empty where the training's packages are not installed.
    """
    try:
        found = library.pictures()
    except UserError:
        return []
    known = {_head(one.noun.name) for one in found if not one.held_out}
    return [
        Picture(
            one.path.stem,
            Image.fromarray(Composed((Placed(one, 0.5, 0.5, _STAMP, 0),), "plain white").draw()),
            (one.noun.name, _head(one.noun.name)),
            (one.noun.kind, general(one.noun.kind), *_themes(one.path)),
            general(one.noun.kind),
        )
        for one in found
        if one.held_out and _head(one.noun.name) in known
    ]


def _themes(path: Path) -> list[str]:
    return [folder.removesuffix("s") for folder in path.relative_to(library.STAMPS).parts[:-1]]


def _head(name: str) -> str:
    return name.split()[-1].lower()
