"""Pictures with the words that a caption may name them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.vision.pictures.fetching import located
from mmspec.vision.pictures.listing import Package, listed_packages

_LIST = Path(__file__).parent / "photographs.json"


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
    """The packages whose photographs are described."""
    return listed_packages(_LIST)


def cached(packages: Sequence[Package]) -> tuple[list[Picture], list[str]]:
    """The photographs of packages that are in the cache, and the names of those that are missing or corrupt."""
    found, missing = located(packages)
    return [Picture(one.name, str(path), one.names, one.kinds, one.group) for one, path in found], missing
