"""Held-out stamps of the package that smol-llava was trained on, whose nouns its training knows from other pictures."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from mmspec.errors import UserError
from mmspec.eval.pictures.picture import Picture
from mmspec.vision.pictures import library
from mmspec.vision.pictures.compose import Composed, Placed
from mmspec.vision.pictures.nouns import general

_SIZE = 0.95


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
            Image.fromarray(Composed((Placed(one, 0.5, 0.5, _SIZE, 0),), "plain white").draw()),
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
