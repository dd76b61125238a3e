"""Gradio components for images and videos that pass uploads on unchanged, and show previews of what browsers do not.

gradio's own components decode images on arrival and report broken ones with their own message. Here uploads are decoded
when a request is answered, or when the page reports that the browser cannot show one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import gradio as gr
from gradio.components.gallery import GalleryData, GalleryImage
from gradio.data_classes import FileData, ImageData

from mmspec.demos import previews
from mmspec.demos.chat_request import Upload


def _upload(file: Any) -> Upload:
    path = previews.original(file.path)
    return Upload(path, file.orig_name or Path(path).name)


# gradio writes a stub file next to the source of each component class, which would hide the source from type checkers.
with mock.patch("gradio.component_meta.create_or_modify_pyi", create=True):

    class ImageUpload(gr.Gallery):
        """Input of images; its value is a list of `Upload`."""

        def get_block_name(self) -> str:
            return "gallery"

        def preprocess(self, payload: GalleryData | None) -> list[Upload]:  # type: ignore[override]
            items = payload.root if payload else []
            files = [item.image if isinstance(item, GalleryImage) else item.video for item in items]
            return [_upload(file) for file in files if file.path]

        def postprocess(self, value: list[Upload] | None) -> GalleryData:  # type: ignore[override]
            images = [ImageData(path=previews.shown(one.path), orig_name=one.name) for one in value or ()]
            return GalleryData(root=[GalleryImage(image=image) for image in images])

    class VideoUpload(gr.Video):
        """Input of one video; its value is a list of at most one `Upload`."""

        def get_block_name(self) -> str:
            return "video"

        def preprocess(self, payload: FileData | None) -> list[Upload]:
            return [_upload(payload)] if payload and payload.path else []

        def postprocess(self, value: list[Upload] | None) -> FileData | None:
            return FileData(path=previews.shown(value[0].path), orig_name=value[0].name) if value else None
