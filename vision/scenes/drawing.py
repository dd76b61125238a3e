"""Renders scenes: antialiased shapes and characters on a plain background."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmspec.vision.scenes.scene import Item, Scene, Sign
from mmspec.vision.scenes.vocabulary import BACKGROUNDS, CELL, COLOURS, INK, SIDE, SLOT

Mask = np.ndarray
"""Coverage 0..1, float32, (height, width, 1)."""

_OVERSAMPLING = 6


def draw(scene: Scene, scale: int = 1, extra_signs: Iterable[Sign] = ()) -> np.ndarray:
    """Renders a scene as uint8 RGB, (96 * scale, 96 * scale, 3)."""
    canvas = np.empty((SIDE * scale, SIDE * scale, 3), np.float32)
    canvas[:] = BACKGROUNDS[scene.background]
    for item in scene.items:
        _blend_item(canvas, item, scale)
    signs = list(extra_signs) if scene.sign is None else [scene.sign, *extra_signs]
    for sign in signs:
        _blend_sign(canvas, sign, INK[scene.background], scale)
    return (canvas + 0.5).astype(np.uint8)


def picture(scene: Scene, scale: int = 1) -> Image.Image:
    """Renders a scene as a Pillow image."""
    return Image.fromarray(draw(scene, scale))


def _blend_item(canvas: np.ndarray, item: Item, scale: int) -> None:
    mask = _shape_mask(item.shape, item.extent * scale)
    centre_y = (item.row + 0.5) * CELL + item.dy
    centre_x = (item.col + 0.5) * CELL + item.dx
    top = round((centre_y - item.extent / 2) * scale)
    left = round((centre_x - item.extent / 2) * scale)
    _blend(canvas, mask, top, left, COLOURS[item.colour])


def _blend_sign(canvas: np.ndarray, sign: Sign, ink: tuple[int, int, int], scale: int) -> None:
    for index, (character, (dx, dy)) in enumerate(zip(sign.text, sign.offsets, strict=True)):
        top = (sign.band * SLOT + dy) * scale
        left = ((sign.slot + index) * SLOT + dx) * scale
        _blend(canvas, _glyph_mask(character, SLOT * scale), top, left, ink)


def _blend(canvas: np.ndarray, mask: Mask, top: int, left: int, colour: tuple[int, int, int]) -> None:
    """Blends a mask over the canvas, clipped to it."""
    height, width = canvas.shape[:2]
    y0, x0 = max(top, 0), max(left, 0)
    y1, x1 = min(top + mask.shape[0], height), min(left + mask.shape[1], width)
    if y0 >= y1 or x0 >= x1:
        return
    cut = mask[y0 - top : y1 - top, x0 - left : x1 - left]
    window = canvas[y0:y1, x0:x1]
    window += cut * (np.asarray(colour, np.float32) - window)


@lru_cache(maxsize=4096)
def _shape_mask(shape: str, extent: int) -> Mask:
    side = extent * _OVERSAMPLING
    image = Image.new("L", (side, side), 0)
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((0, 0, side - 1, side - 1), fill=255)
    elif shape == "ring":
        pen.ellipse((0, 0, side - 1, side - 1), fill=255)
        hole = side * 0.27
        pen.ellipse((hole, hole, side - 1 - hole, side - 1 - hole), fill=0)
    else:
        pen.polygon([(x * side, y * side) for x, y in _outline(shape)], fill=255)
    return _shrink(image, extent)


def _outline(shape: str) -> list[tuple[float, float]]:
    """Corners of a polygon in the unit square."""
    if shape == "square":
        return [(0.07, 0.07), (0.93, 0.07), (0.93, 0.93), (0.07, 0.93)]
    if shape == "triangle":
        return [(0.5, 0.03), (1.0, 0.95), (0.0, 0.95)]
    if shape == "diamond":
        return [(0.5, 0.0), (0.88, 0.5), (0.5, 1.0), (0.12, 0.5)]
    if shape == "cross":
        a, b = 0.34, 0.66
        return [(a, 0), (b, 0), (b, a), (1, a), (1, b), (b, b), (b, 1), (a, 1), (a, b), (0, b), (0, a), (a, a)]
    if shape == "star":
        radii = (0.53, 0.21)
        angles = (math.pi * (k / 5 - 0.5) for k in range(10))
        return [(0.5 + radii[k % 2] * math.cos(a), 0.53 + radii[k % 2] * math.sin(a)) for k, a in enumerate(angles)]
    raise ValueError(f"unknown shape: {shape!r}")


@lru_cache(maxsize=1024)
def _glyph_mask(character: str, side: int) -> Mask:
    big = side * _OVERSAMPLING
    image = Image.new("L", (big, big), 0)
    font = ImageFont.load_default(size=big * 0.9)
    pen = ImageDraw.Draw(image)
    pen.text((big / 2, big / 2), character, fill=255, font=font, anchor="mm", stroke_width=big / 40)
    return _shrink(image, side)


def _shrink(image: Image.Image, side: int) -> Mask:
    small = np.asarray(image.resize((side, side), Image.Resampling.BOX), np.float32) / 255
    return small[:, :, None]
