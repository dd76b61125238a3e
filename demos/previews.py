"""Previews of uploads that browsers do not show (TIFF, AVI, ...): a small PNG or MP4 file beside the upload."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from PIL import Image

from mmspec.demos.chat_request import MAX_VIDEO_SECONDS, Kind, Upload, decoder
from mmspec.files import atomic

SPACE = 1 << 20  # bytes that a preview may take
_SUFFIXES: dict[Kind, str] = {"image": ".preview.png", "video": ".preview.mp4"}
_SIDE = 400  # pixels of the longer side, at most
_FRAMES = 48


def shown(path: str) -> str:
    """The preview of an upload if there is one, else the upload itself."""
    return next((path + suffix for suffix in _SUFFIXES.values() if os.path.isfile(path + suffix)), path)


def original(path: str) -> str:
    """The upload of a preview; any other path itself."""
    for suffix in _SUFFIXES.values():
        path = path.removesuffix(suffix)
    return path


def write(upload: Upload, kind: Kind) -> None:
    """Write the preview of an upload.

    Raises:
        UserError: the file cannot be decoded.
    """
    with atomic(Path(upload.path + _SUFFIXES[kind])) as part:
        if kind == "image":
            image: Any = decoder().load(upload.path, "image", name=upload.name)
            _small(image).save(part)
        else:
            options: dict[str, Any] = {"frames": _FRAMES, "max_duration": MAX_VIDEO_SECONDS}
            video: Any = decoder().load(upload.path, "video", name=upload.name, **options)
            rate = Fraction(len(video.frames) / max(video.duration, 0.1)).limit_denominator(1000)
            write_video([_small(frame) for frame in video.frames], part, rate)


def _small(image: Image.Image) -> Image.Image:
    """A copy of at most ``_SIDE`` pixels; H.264 needs even numbers of them."""
    copy = image.copy()
    copy.thumbnail((_SIDE, _SIDE))
    width, height = (max(2, side - side % 2) for side in copy.size)
    return copy.resize((width, height))


def write_video(frames: Sequence[Image.Image], path: Path, rate: int | Fraction) -> None:
    """Write frames of one size, of even width and height, as an H.264 video."""
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
