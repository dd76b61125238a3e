from __future__ import annotations

import numpy as np

from mmspec.eval.pictures.stamps import held_out_stamps
from mmspec.vision.pictures import library
from mmspec.vision.pictures.library import Picture
from tests.vision.conftest import small_packages

__all__ = ["small_packages"]


def test_held_out_stamps_with_known_nouns_are_listed(small_packages, monkeypatch):
    """Of the stamps "dog", "chicken" and "red apple", only dogs are in the clip art, too."""
    kept = {"dog.png", "hen.png", "apple.png"}
    monkeypatch.setattr(Picture, "held_out", property(lambda self: self.path.name in kept))
    (dog,) = held_out_stamps()
    assert (dog.name, dog.names, dog.kinds, dog.group) == ("dog", ("dog", "dog"), ("dog", "animal", "animal"), "animal")
    pixels = np.asarray(dog.image)
    assert (pixels[96, 96] == (255, 0, 0)).all() or pixels[96, 96, 0] > 150
    assert (pixels[2, 2] > 240).all()


def test_without_the_packages_there_are_none(small_packages, monkeypatch):
    monkeypatch.setattr(library, "STAMPS", small_packages / "nowhere")
    assert held_out_stamps() == []
