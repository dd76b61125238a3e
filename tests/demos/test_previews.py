"""Tests of previews: small files of formats that browsers show, with the upload's content."""

import av
import numpy as np
import pytest
from PIL import Image

from mmspec.demos import storage
from mmspec.demos.chat_request import Upload
from mmspec.errors import UserError
from mmspec.vision.images import load_image
from mmspec.vision.video import load_video


def write_video(path, codec, size, seconds=2):
    """Write a video that is black in its first half and white in its second; returns its path."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(10 * seconds):
            grey = np.full((size[1], size[0], 3), 255 * (number >= 5 * seconds), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


@pytest.mark.parametrize(("size", "small"), [((1200, 601), (400, 200)), ((31, 7), (30, 6)), ((900, 1), (400, 2))])
def test_image(tmp_path, size, small):
    path = str(tmp_path / "scan.tiff")
    Image.new("RGB", size, "navy").save(path)
    assert storage.preview_of(path) == path
    storage.write_preview(Upload(path, "scan.tiff"), "image")
    shown = storage.preview_of(path)
    assert storage.original_of(shown) == path
    with Image.open(shown) as image:
        assert (image.format, image.size) == ("PNG", small)
    assert load_image(shown).getpixel((0, 0)) == (0, 0, 128)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("name", "codec"), [("clip.avi", "mpeg4"), ("clip.mov", "mpeg4")])
def test_video(tmp_path, name, codec):
    path = write_video(tmp_path / name, codec, (800, 450))
    storage.write_preview(Upload(path, name), "video")
    shown = storage.preview_of(path)
    assert storage.original_of(shown) == path
    with av.open(shown) as container:
        (stream,) = container.streams
        assert (stream.codec_context.name, stream.width, stream.height) == ("h264", 400, 224)
        assert stream.pix_fmt == "yuv420p"
    clip = load_video(shown, frames=4)
    assert clip.duration == pytest.approx(2, abs=0.1)
    levels = [np.asarray(frame).mean() for frame in clip.frames]
    assert levels[0] < 20 and levels[1] < 20 and levels[2] > 235 and levels[3] > 235  # noqa: PT018


def test_broken_file_has_none(tmp_path):
    (tmp_path / "a.tiff").write_bytes(b"II*\x00broken")
    with pytest.raises(UserError, match=r"^a\.tiff: expected"):
        storage.write_preview(Upload(str(tmp_path / "a.tiff"), "a.tiff"), "image")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tiff"]
