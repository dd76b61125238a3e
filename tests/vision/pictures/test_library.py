from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from mmspec.errors import UserError
from mmspec.vision.pictures import library
from mmspec.vision.pictures.library import Picture, pictures
from mmspec.vision.pictures.nouns import Noun
from tests.vision.pictures.packages import draw_picture


def test_stamps_and_clip_art_are_named(small_packages: Path) -> None:
    found = {(picture.source, picture.path.stem): picture.noun for picture in pictures()}
    assert found == {
        ("stamps", "dog"): Noun("dog", "dog"),
        ("stamps", "hen"): Noun("chicken", "bird"),
        ("stamps", "apple"): Noun("red apple", "fruit"),
        ("stamps", "bike"): Noun("blue bicycle", "bicycle"),
        ("clip art", "dog_anna_b_01"): Noun("dog", "dog"),
        ("clip art", "mountain_bike_carl_01"): Noun("mountain bike", "bicycle"),
    }


def test_emoji_are_named_by_their_code_points(small_packages: Path, tmp_path: Path) -> None:
    for name in ("1f415", "1f600", "0031-20e3", "readme"):
        draw_picture(tmp_path / "emoji" / f"{name}.png", "red")
    found = [picture for picture in pictures(tmp_path / "emoji") if picture.source == "emoji"]
    assert [(picture.path.stem, picture.noun) for picture in found] == [("1f415", Noun("dog", "dog"))]


def test_margins_are_cut_off_and_large_pictures_made_smaller(small_packages: Path, tmp_path: Path) -> None:
    draw_picture(tmp_path / "large.png", "red", (800, 400))
    pixels = Picture(tmp_path / "large.png", Noun("disc", "thing"), "emoji").pixels()
    assert (pixels.mode, pixels.size) == ("RGBA", (192, 96))
    assert pixels.getpixel((96, 48)) == (255, 0, 0, 255)


def test_every_eighth_stamp_is_held_out(small_packages: Path) -> None:
    paths = [library.STAMPS / f"animals/{number}.png" for number in range(400)]
    held = [path for path in paths if Picture(path, Noun("dog", "dog"), "stamps").held_out]
    assert held == [p for p in paths if zlib.crc32(f"animals/{p.name}".encode()) % 8 == 0]
    assert 30 < len(held) < 70
    assert not any(Picture(path, Noun("dog", "dog"), "emoji").held_out for path in paths)


@pytest.mark.parametrize(("name", "package"), [("STAMPS", "tuxpaint-stamps-default"), ("CLIP_ART", "openclipart-png")])
def test_missing_pictures_are_said_with_their_package(
    small_packages: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr(library, name, small_packages / "nowhere")
    with pytest.raises(UserError, match=f"nowhere: run apt-get install {package}"):
        pictures()
