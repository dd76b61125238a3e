"""Image and video components that hand on what was sent, as it was sent.

gradio's own decode an image on arrival, and answer a broken one with a message of theirs. Here what a file is, and
whether it is whole, is judged where answers are made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import gradio as gr

from demos.questions import Upload


def _upload(payload: Any) -> Upload | None:
    if payload is None or not payload.path:
        return None
    return Upload(payload.path, payload.orig_name or Path(payload.path).name)


# For every class of components gradio writes a stub file beside its source, which would hide that from type checkers.
with mock.patch("gradio.component_meta.create_or_modify_pyi", create=True):

    class Picture(gr.Image):
        """An image."""

        def get_block_name(self) -> str:
            return "image"

        def preprocess(self, payload: Any) -> Upload | None:  # type: ignore[override]
            return _upload(payload)

    class Film(gr.Video):
        """A video."""

        def get_block_name(self) -> str:
            return "video"

        def preprocess(self, payload: Any) -> Upload | None:
            return _upload(payload)
