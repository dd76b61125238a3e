"""Scenes and clips: reproducible, disjoint splits, correct rendering."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mmspec.vision.scenes.clips import EVENTS, sample_clip
from mmspec.vision.scenes.drawing import draw
from mmspec.vision.scenes.scene import Item, Scene, Sign, sample_dense, sample_scene, sample_sign, seeded
from mmspec.vision.scenes.vocabulary import BACKGROUNDS, CELL, CHARACTERS, COLOURS, INK, SHAPES, SIDE, SIZES, WORDS


def far(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Mask of pixels that are visibly another colour."""
    return np.abs(pixels.astype(int) - np.array(colour)).max(-1) > 24


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_same_seed_same_scene_and_pixels(split: str) -> None:
    for index in range(20):
        first, second = sample_scene(seeded(split, index)), sample_scene(seeded(split, index))
        assert first == second
        assert np.array_equal(draw(first), draw(second))


def test_splits_are_disjoint() -> None:
    def states(split: str) -> set[int]:
        return {seeded(split, index).getrandbits(128) for index in range(3000)}

    train, held_out = states("train"), states("heldout")
    assert len(train) == len(held_out) == 3000
    assert not train & held_out
    with pytest.raises(ValueError, match="split must be one of"):
        seeded("test", 0)


def test_objects_are_in_their_grid_cells() -> None:
    for index in range(500):
        scene = sample_scene(seeded("train", index))
        cells = [item.cell for item in scene.items]
        assert len(cells) <= 5
        assert len(set(cells)) == len(cells)
        assert cells == sorted(cells)
        assert scene.items or scene.sign
        if scene.sign:
            assert scene.sign.row not in {row for row, _ in cells}
            assert scene.sign.slot + len(scene.sign.text) <= 6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_an_object_is_drawn_inside_its_cell(shape: str, size: str) -> None:
    rng = random.Random(f"{shape} {size}")
    for row, col in [(0, 0), (1, 2), (2, 1)]:
        for extent in SIZES[size]:
            slack = 5 if size == "small" else 2
            item = Item(shape, "pink", size, row, col, extent, rng.choice((-slack, slack)), rng.choice((-slack, slack)))
            pixels = draw(Scene("black", (item,)))
            touched = far(pixels, BACKGROUNDS["black"])
            inside = touched[row * CELL : (row + 1) * CELL, col * CELL : (col + 1) * CELL]
            assert inside.sum() > 0.2 * extent**2
            assert touched.sum() - inside.sum() <= 0.02 * touched.sum()


def test_shapes_look_different() -> None:
    for extent in (14, 28):
        masks = [far(draw(Scene("black", (Item(s, "red", "small", 1, 1, extent),))), (15, 15, 15)) for s in SHAPES]
        for i, first in enumerate(masks):
            for second in masks[:i]:
                assert (first ^ second).sum() > 0.12 * first.sum()


def test_a_sign_fills_its_slots_in_order() -> None:
    sign = Sign("AB7", band=3, slot=2, offsets=((0, 0),) * 3)
    touched = far(draw(Scene("white", (), sign)), BACKGROUNDS["white"])
    slots = touched.reshape(6, 16, 6, 16).any((1, 3))
    assert np.argwhere(slots).tolist() == [[3, 2], [3, 3], [3, 4]]


def test_characters_look_different() -> None:
    def mask(character: str) -> np.ndarray:
        return draw(Scene("black", (), Sign(character, 0, 0, ((0, 0),))))[:16, :16, 0].astype(float)

    masks = [mask(character) for character in CHARACTERS]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert np.abs(first - second).sum() > 800


def test_enlarged_scene_shrinks_to_the_small_one() -> None:
    from PIL import Image

    for index in range(10):
        scene = sample_scene(seeded("train", index))
        shrunk = Image.fromarray(draw(scene, 4)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(shrunk).astype(int) - draw(scene)).mean() < 4


def test_vocabulary_is_usable() -> None:
    assert all(1 <= len(word) <= 6 and set(word) <= set(CHARACTERS) for word in WORDS)
    assert len(set(WORDS)) == len(WORDS)
    assert set(INK) == set(BACKGROUNDS)
    colours = list(COLOURS.values()) + list(BACKGROUNDS.values())
    for i, first in enumerate(colours):
        assert all(max(abs(a - b) for a, b in zip(first, second, strict=True)) > 45 for second in colours[:i])
    texts = [sample_sign(random.Random(i), 0).text for i in range(400)]
    assert any(t.isdigit() for t in texts)
    assert any(t in WORDS for t in texts)
    assert any(t not in WORDS for t in texts)


def test_rows_of_dense_scenes_have_objects_or_signs() -> None:
    for index in range(50):
        scene, signs = sample_dense(seeded("train", index))
        assert not {item.cell[0] for item in scene.items} & {sign.row for sign in signs}


def test_clips_show_their_events() -> None:
    seen = set()
    for index in range(300):
        clip = sample_clip(seeded("train", index))
        start, end = clip.at(0.0), clip.at(1.0)
        assert len({(item.colour, item.shape) for item in clip.items}) == len(clip.items)
        for event in clip.events:
            seen.add(event.kind)
            item, goal = clip.items[event.index], event.goal
            if event.kind == "appear":
                assert item not in start.items
                assert item in end.items
            elif event.kind == "vanish":
                assert item in start.items
                assert item not in end.items
            else:
                assert item in start.items
                assert goal in end.items
                changed = {"move": "cell", "recolour": "colour", "grow": "size", "shrink": "size"}[event.kind]
                assert getattr(item, changed) != getattr(goal, changed)
    assert seen == set(EVENTS)


def test_a_clip_has_any_number_of_frames() -> None:
    clip = sample_clip(seeded("train", 5))
    assert [len(clip.frames(count)) for count in (1, 4, 8, 16)] == [1, 4, 8, 16]
    assert clip.frames(16)[0] == clip.frames(4)[0]
    assert clip.frames(16)[-1] == clip.frames(4)[-1]


def test_objects_do_not_move_through_each_other() -> None:
    for index in range(300):
        clip = sample_clip(seeded("train", index))
        for scene in clip.frames(9):
            places = [(item.row, item.col) for item in scene.items]
            for i, first in enumerate(places):
                assert all(max(abs(first[0] - r), abs(first[1] - c)) >= 0.5 for r, c in places[:i])
