"""Gradio components for images and videos that pass uploads on unchanged.

gradio's own components decode images on arrival and report broken ones with their own message. Here uploads are decoded
when a request is answered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import gradio as gr

from mmspec.demos.chat_request import Upload


def _upload(payload: Any) -> Upload | None:
    if payload is None or not payload.path:
        return None
    return Upload(payload.path, payload.orig_name or Path(payload.path).name)


# gradio writes a stub file next to the source of each component class, which would hide the source from type checkers.
with mock.patch("gradio.component_meta.create_or_modify_pyi", create=True):

    class ImageUpload(gr.Image):
        """Image input; its value is an `Upload`."""

        def get_block_name(self) -> str:
            return "image"

        def preprocess(self, payload: Any) -> Upload | None:  # type: ignore[override]
            return _upload(payload)

    class VideoUpload(gr.Video):
        """Video input; its value is an `Upload`."""

        def get_block_name(self) -> str:
            return "video"

        def preprocess(self, payload: Any) -> Upload | None:
            return _upload(payload)
