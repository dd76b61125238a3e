"""Handler of ``mmspec.vision.decoding.MediaDecoder``'s worker processes: decodes media to RGB bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from PIL import Image

from mmspec.vision.images import load_image
from mmspec.vision.video import kind_of, load_video


def handle(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], Iterator[bytes]]:
    """Decode a request's media: a file by its ``path``, or its content.

    Returns:
        The reply with the ``sizes`` of images, and their bytes.
    """
    reply, images = _decode(request, request.get("path", body))
    sizes = {"sizes": [image.size for image in images]}
    return reply | sizes, (image.tobytes() for image in images)


def _decode(request: dict[str, Any], source: str | bytes) -> tuple[dict[str, Any], list[Image.Image]]:
    name = request["name"]
    os.chdir(request["cwd"])
    kind = request["kind"] or kind_of(source, name=name)
    if kind == "image":
        return {}, [load_image(source, name=name)]
    video = load_video(source, name=name, **request["video"])
    images = {id(frame): frame for frame in video.frames}  # repeated frames are sent once
    order = list(images)
    reply = {"times": video.times, "duration": video.duration, "name": video.name, "fps": video.fps}
    return {"video": reply, "frames": [order.index(id(frame)) for frame in video.frames]}, list(images.values())
