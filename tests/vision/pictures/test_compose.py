from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmspec.vision.pictures.compose import BACKGROUNDS, PLACES, SIDE, Composed, Placed, background
from mmspec.vision.pictures.library import Picture
from mmspec.vision.pictures.nouns import Noun
from tests.vision.pictures.packages import draw_picture


@pytest.fixture
def disc(tmp_path: Path) -> Picture:
    draw_picture(tmp_path / "disc.png", "red", (100, 60))
    return Picture(tmp_path / "disc.png", Noun("disc", "thing"), "emoji")


def is_red(pixels: np.ndarray) -> np.ndarray:
    red, green, blue = (pixels[..., k].astype(int) for k in range(3))
    return (red > 90) & (green < 80) & (blue < 80)


@pytest.mark.parametrize(("x", "y"), [(0.25, 0.5), (0.75, 0.25), (0.5, 0.8)])
def test_a_thing_is_drawn_where_it_is_placed(disc: Picture, x: float, y: float) -> None:
    for look in range(8):
        pixels = Composed((Placed(disc, x, y, 0.35, look),), "plain white", look).draw()
        assert pixels.shape == (SIDE, SIDE, 3)
        rows, columns = np.nonzero(is_red(pixels))
        assert rows.mean() / SIDE == pytest.approx(y, abs=0.03)
        assert columns.mean() / SIDE == pytest.approx(x, abs=0.03)
        assert (np.ptp(columns) + 1) / SIDE == pytest.approx(0.35, abs=0.09)


def test_places_are_named_by_thirds(disc: Picture) -> None:
    named = [[Placed(disc, x, y, 0.3, 0).place for x in (0.1, 0.5, 1.0)] for y in (0.1, 0.5, 1.0)]
    assert named == [list(row) for row in PLACES]


def test_the_same_picture_is_drawn_the_same_and_looks_differ(disc: Picture) -> None:
    composed = Composed((Placed(disc, 0.5, 0.5, 0.6, 3),), "texture", 5)
    assert np.array_equal(composed.draw(), composed.draw())
    assert not np.array_equal(composed.draw(), replace(composed, look=6).draw())


def test_the_mask_is_where_the_thing_is(disc: Picture) -> None:
    mask = Composed((Placed(disc, 0.25, 0.75, 0.3, 0),), "gradient").mask()
    assert mask[4:, 1].all()
    assert not mask[:3].any()
    assert not mask[:, 3:].any()
    assert Composed((Placed(disc, 0.5, 0.5, 1.0, 0),), "gradient").mask().all()


def test_plain_backgrounds_have_their_colour() -> None:
    for name, colour in BACKGROUNDS.items():
        composed = Composed((), f"plain {name}", 2)
        assert composed.colour == name
        assert np.abs(composed.draw().mean((0, 1)) - colour).max() < 40
    assert Composed((), "noise").colour is None


@pytest.mark.parametrize("name", ["gradient", "texture", "noise", "text"])
def test_pictures_of_nothing_are_drawn(name: str) -> None:
    for look in range(5):
        pixels = Composed((), name, look).draw()
        assert (pixels.dtype, pixels.shape) == (np.uint8, (SIDE, SIDE, 3))
        assert pixels.std() > 0


def test_photographs_fill_the_picture_and_stand_behind_things(disc: Picture, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (300, 90), (20, 160, 40)).save(tmp_path / "meadow.jpg")
    meadow = Picture(tmp_path / "meadow.jpg", Noun("meadow", "landscape"), "photographs")
    alone = Composed((Placed(meadow, 0.5, 0.5, 1.0, 1),), "photograph").draw()
    assert np.abs(alone.astype(int) - (20, 160, 40)).max() < 60
    before = Composed((Placed(disc, 0.5, 0.5, 0.4, 1),), "photograph", 1, meadow).draw()
    assert is_red(before[80:112, 80:112]).all()
    assert np.abs(before[:20].astype(int) - (20, 160, 40)).max() < 60


def test_backgrounds_are_drawn_at_random() -> None:
    rng = random.Random(0)
    names = [background(rng) for _ in range(300)]
    assert {"plain white", "texture", "gradient", "plain red"} < set(names)
