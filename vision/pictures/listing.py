"""Lists of photographs: which package holds each, and the words that describe it. No picture is part of them."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Photograph:
    """A photograph in a package.

    Attributes:
        name: unique in the list.
        path: in the package; ``OUTER!INNER`` is a file in a Qt resource file.
        sha256: of the file, in hexadecimal.
        names: words for the main thing, singular.
        kinds: words for its kind, or for what else is in view.
        group: of pictures that are counted together.
        licence: of the picture where its package states one, else of the package.
    """

    name: str
    path: str
    sha256: str
    names: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    group: str = ""
    licence: str = ""

    @property
    def file(self) -> str:
        """Its file name in the cache."""
        return self.name + Path(self.path).suffix


@dataclass(frozen=True)
class Package:
    """A public package with photographs.

    Attributes:
        manager: ``apt``, ``npm`` or ``pip``.
        name, version: as the manager knows them.
    """

    manager: str
    name: str
    version: str
    pictures: tuple[Photograph, ...]

    @property
    def slug(self) -> str:
        """A file name, another one for other photographs of the same package."""
        own = zlib.crc32(" ".join(picture.sha256 for picture in self.pictures).encode())
        return re.sub(r"[^\w.+-]", "_", f"{self.manager}-{self.name}-{self.version}-{own:08x}")


def listed_packages(file: Path) -> list[Package]:
    """The packages of a list, each with its photographs."""
    return [
        Package(**{**entry, "pictures": tuple(map(_photograph, entry["pictures"]))})
        for entry in json.loads(file.read_text())
    ]


def _photograph(entry: dict[str, Any]) -> Photograph:
    return Photograph(**{**entry, "names": tuple(entry["names"]), "kinds": tuple(entry.get("kinds", ()))})
