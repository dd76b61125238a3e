"""Pictures with names from packages that are installed, read where they lie."""

from __future__ import annotations

import re
import unicodedata
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PIL import Image

from mmspec.errors import UserError
from mmspec.vision.pictures.fetching import Package, listed_packages, located
from mmspec.vision.pictures.nouns import Noun, compound, general, noun

STAMPS = Path("/usr/share/tuxpaint/stamps")
CLIP_ART = Path("/usr/share/openclipart/png")
_SIDE = 192
_HELD_OUT_EVERY = 8
_COPIES = 4
"""As many files of one size are taken for copies of a placeholder."""

_PIXELS = 8_000_000
"""Larger pictures take seconds to read."""


@dataclass(frozen=True)
class Picture:
    """A picture of one thing, cut out where it has an alpha channel.

    Attributes:
        path: of the file.
        noun: what it shows.
        source: "stamps", "clip art", "emoji" or "photographs".
    """

    path: Path
    noun: Noun
    source: str

    @property
    def is_photograph(self) -> bool:
        """Whether the thing is not cut out."""
        return self.source == "photographs"

    @property
    def held_out(self) -> bool:
        """Whether it is kept for evaluation: every eighth stamp, by its path."""
        return (
            self.source == "stamps" and zlib.crc32(str(self.path.relative_to(STAMPS)).encode()) % _HELD_OUT_EVERY == 0
        )

    def pixels(self) -> Image.Image:
        """Returns the picture without transparent margins, RGBA, at most 192 pixels wide and high."""
        return _pixels(self.path)


@lru_cache(maxsize=8192)
def _pixels(path: Path) -> Image.Image:
    with Image.open(path) as file:
        image = file.convert("RGBA")
    image = image.crop(image.getchannel("A").point(lambda a: 255 * (a > 24)).getbbox())
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return image


def pictures(emoji: Path | None = None) -> list[Picture]:
    """Returns the pictures of all packages in a fixed order, photographs as far as they were fetched.

    Args:
        emoji: folder of pictures whose names are code points in hexadecimal, "1f34e.png".

    Raises:
        UserError: the stamps or the clip art are not installed.
    """
    for folder, package in ((STAMPS, "tuxpaint-stamps-default"), (CLIP_ART, "openclipart-png")):
        if not folder.is_dir():
            raise UserError(
                f"the training pictures are not installed, expected {folder}: run apt-get install {package}"
            )
    return [*_stamps(), *_clip_art(), *(_emoji(emoji) if emoji else ()), *_photographs()]


_NOT_THINGS = ("symbols", "flags", "roadsigns", "money", "cartoon/tux", "body_parts", "moon", "planets", "halloween")


def _stamps() -> Iterator[Picture]:
    for path in sorted(STAMPS.rglob("*.png")):
        text = path.with_suffix(".txt")
        inside = str(path.relative_to(STAMPS))
        if not text.is_file() or any(name in inside for name in _NOT_THINGS):
            continue
        caption = text.read_text(encoding="utf-8").splitlines()[0]
        if found := _named(caption):
            yield Picture(path, found, "stamps")


def _named(caption: str) -> Noun | None:
    """The thing of "A blue bicycle, made of steel. It ..." """
    phrase = re.split(r"[.,(]|\b(?:with|from|of|in|on|at|that|which|called|used)\b", caption)[0].strip()
    match = re.fullmatch(r"(?:An?|The|Some|Two|Three)\s+([A-Za-z' -]+)", phrase)
    return noun(match[1]) if match and len(match[1].split()) <= 4 else None


_THEMES: dict[str, frozenset[str]] = {
    "animals": frozenset({"animal"}),
    "food": frozenset({"food", "drink", "container", "nut", "utensil", "plant"}),
    "transportation": frozenset({"vehicle", "aircraft"}),
    "plants": frozenset({"plant", "food"}),
    "buildings": frozenset({"building", "landscape"}),
    "clothing": frozenset({"piece of clothing", "container"}),
    "tools": frozenset({"tool", "device", "weapon", "container", "kitchen utensil", "utensil"}),
    "containers": frozenset({"container"}),
    "recreation": frozenset({"musical instrument", "ball", "sports equipment", "toy", "vehicle"}),
    "electronics": frozenset({"device", "electronic device", "computer", "camera", "telephone", "household appliance"}),
    "hardware": frozenset({"device", "electronic device", "computer", "telephone", "machine"}),
    "furniture": frozenset({"piece of furniture", "container", "lamp", "clock"}),
}
"""Folders of the clip art that are read, and the general kinds of what they show: other names are misread."""


def _clip_art() -> Iterator[Picture]:
    files = sorted(CLIP_ART.rglob("*.png"))
    copies = Counter(path.stat().st_size for path in files)  # placeholders of images that were lost
    for path in files:
        themes = [_THEMES[part] for part in path.relative_to(CLIP_ART).parts if part in _THEMES]
        if not themes:
            continue
        words = re.findall(r"[a-z]+", path.stem.lower())
        named = (compound(" ".join(words[:count])) for count in (2, 1) if len(words) > count)
        found = next((name for name in named if name and general(name.kind) in themes[-1]), None)
        if (
            found
            and len(found.name) > 2
            and found.name != "simple"
            and copies[path.stat().st_size] < _COPIES
            and _small(path)
        ):
            yield Picture(path, found, "clip art")


def _small(path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(path) as file:
            return file.width * file.height <= _PIXELS


def _emoji(folder: Path) -> Iterator[Picture]:
    for path in sorted([*folder.glob("*.png"), *folder.glob("*.webp")]):
        if not re.fullmatch(r"[0-9A-Fa-f]{4,5}", path.stem):
            continue
        name = unicodedata.name(chr(int(path.stem, 16)), "").lower()
        found = noun(name) if 0 < len(name.split()) <= 2 and "face" not in name else None
        if found and found.kind not in ("person", "part of the body"):
            yield Picture(path, found, "emoji")


def photograph_packages() -> list[Package]:
    """Returns the packages of photographs to learn from; none of these is in the test set of `mmspec eval`."""
    return listed_packages(Path(__file__).parent / "photographs.json")


def _photographs() -> Iterator[Picture]:
    for listed, path in located(photograph_packages())[0]:
        [name] = listed.names
        yield Picture(path, noun(name) or Noun(name, "thing"), "photographs")
