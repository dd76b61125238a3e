"""The list of photographs: which package holds each, and the words that describe it. No picture is part of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "photographs.json"


@dataclass(frozen=True)
class Photograph:
    """A photograph in a package.

    Attributes:
        name: unique in the list.
        path: in the package; ``OUTER!INNER`` is a file in a Qt resource file.
        sha256: of the file, in hexadecimal.
        licence: of the picture where its package states one, else of the package.
        group, names, kinds: as for ``Picture``.
    """

    name: str
    path: str
    sha256: str
    licence: str
    group: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]

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
        """A file name."""
        return re.sub(r"[^\w.+-]", "_", f"{self.manager}-{self.name}-{self.version}")


def listed_packages(file: Path = _FILE) -> list[Package]:
    """The packages of the list, each with its photographs."""
    return [
        Package(**{**entry, "pictures": tuple(map(_photograph, entry["pictures"]))})
        for entry in json.loads(file.read_text())
    ]


def _photograph(entry: dict[str, Any]) -> Photograph:
    return Photograph(**{**entry, "names": tuple(entry["names"]), "kinds": tuple(entry["kinds"])})
