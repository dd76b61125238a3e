"""A picture with the words that a caption may name it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
