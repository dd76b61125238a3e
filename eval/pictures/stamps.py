"""Held-out stamps of the package that smol-llava was trained on, whose nouns its training knows from other pictures."""

from __future__ import annotations

from PIL import Image

from mmspec.errors import UserError
from mmspec.eval.pictures.picture import Picture
from mmspec.vision.pictures.compose import Composed, Placed
from mmspec.vision.pictures.library import pictures
from mmspec.vision.pictures.nouns import general

_SIZE = 0.95


def held_out_stamps() -> list[Picture]:
    """The stamps on white, each with its noun and kind. Empty where the training's packages are not installed."""
    try:
        library = pictures()
    except UserError:
        return []
    known = {_head(one.noun.name) for one in library if not one.held_out}
    return [
        Picture(
            one.path.stem,
            Image.fromarray(Composed((Placed(one, 0.5, 0.5, _SIZE, 0),), "plain white").draw()),
            (one.noun.name, _head(one.noun.name)),
            (one.noun.kind, general(one.noun.kind)),
            general(one.noun.kind),
        )
        for one in library
        if one.held_out and _head(one.noun.name) in known
    ]


def _head(name: str) -> str:
    return name.split()[-1].lower()
