"""The list of photographs; blank pictures, from their pixels; held-out stamps."""

from __future__ import annotations

import re

import numpy as np

from mmspec.eval.pictures.judging import names
from mmspec.eval.pictures.picture import blank_pictures, held_out_stamps, photograph_packages
from mmspec.vision.pictures import library
from mmspec.vision.pictures.fetching import COMMANDS
from mmspec.vision.pictures.library import Picture
from tests.vision.conftest import small_packages

__all__ = ["small_packages"]

TRAINED_ON = {"tuxpaint-stamps-default", "openclipart-png", "openmoji", "fluent-emoji"}


def test_blank_pictures_are_what_they_are_called():
    pictures = blank_pictures()
    assert len({one.name for one in pictures}) == len(pictures) == 20
    assert all(not one.names and one.image.size == (384, 288) for one in pictures)
    pixels = {one.name: np.asarray(one.image.convert("RGB"), int) for one in pictures}
    for name, values in pixels.items():
        changes = np.abs(np.diff(values, axis=1)).max(), np.abs(np.diff(values, axis=0)).max()
        if name.startswith("colour"):
            assert max(changes) == 0
        elif name.startswith("gradient"):
            assert 0 < max(changes) <= 8
        elif name.startswith("noise"):
            assert values.std() > 5
        else:
            assert name.startswith("text")
            assert 0.003 < (values < 128).mean() < 0.1
            assert (values[:40] == 255).all()


def test_blank_pictures_are_the_same_each_time():
    for one, other in zip(blank_pictures(), blank_pictures(), strict=True):
        assert one.image.tobytes() == other.image.tobytes()


def test_the_list():
    packages = photograph_packages()
    pictures = [one for package in packages for one in package.pictures]
    assert len(pictures) == len({one.name for one in pictures}) == len({one.sha256 for one in pictures}) == 60
    assert {package.manager for package in packages} == set(COMMANDS)
    assert not TRAINED_ON & {package.name for package in packages}
    assert len({package.slug for package in packages}) == len(packages)
    for one in pictures:
        assert re.fullmatch("[0-9a-f]{64}", one.sha256)
        assert re.fullmatch(r"[a-z-]+\.(?:webp|jpg|png|gif)", one.file)
        assert one.names
        assert one.group
        assert one.licence
        assert not {*one.names} & {*one.kinds}
        assert all(names(f"Here is a {word}.", (word,)) for word in (*one.names, *one.kinds))


def test_the_groups_are_spread():
    groups = [one.group for package in photograph_packages() for one in package.pictures]
    assert len(set(groups)) == 10
    assert max(map(groups.count, groups)) <= 15


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
