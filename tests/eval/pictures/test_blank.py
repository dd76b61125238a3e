"""Blank pictures: what each group promises, from the pixels."""

import numpy as np

from mmspec.eval.pictures.blank import blank_pictures


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
