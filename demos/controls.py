"""Components of a tab: inputs on the left, the result on the right."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import gradio as gr
from gradio.components.gallery import GalleryData, GalleryImage
from gradio.data_classes import FileData, ImageData

from mmspec import plugins
from mmspec.demos import views
from mmspec.demos.catalog import FEWEST, MOST, Catalog, Example, label, media, photographs, texts
from mmspec.demos.chat_request import (
    DEFAULT_PROMPTS,
    MAX_FRAMES,
    MAX_IMAGES,
    MAX_NEW_TOKENS,
    MAX_PROMPT_CHARS,
    ChatState,
    Kind,
    Upload,
    parse_conversation,
)
from mmspec.demos.storage import original_of, preview_of


def _upload(file: Any) -> Upload:
    path = original_of(file.path)
    return Upload(path, file.orig_name or Path(path).name)


# gradio writes a stub file next to the source of each component class, which would hide the source from type checkers.
with mock.patch("gradio.component_meta.create_or_modify_pyi", create=True):

    class ImageUpload(gr.Gallery):
        """Input of images; its value is a list of ``Upload``."""

        def get_block_name(self) -> str:
            return "gallery"

        def preprocess(self, payload: GalleryData | None) -> list[Upload]:  # type: ignore[override]
            items = payload.root if payload else []
            files = [item.image if isinstance(item, GalleryImage) else item.video for item in items]
            return [_upload(file) for file in files if file.path]

        def postprocess(self, value: list[Upload] | None) -> GalleryData:  # type: ignore[override]
            images = [ImageData(path=preview_of(one.path), orig_name=one.name) for one in value or ()]
            return GalleryData(root=[GalleryImage(image=image) for image in images])

    class VideoUpload(gr.Video):
        """Input of one video; its value is a list of at most one ``Upload``."""

        def get_block_name(self) -> str:
            return "video"

        def preprocess(self, payload: FileData | None) -> list[Upload]:
            return [_upload(payload)] if payload and payload.path else []

        def postprocess(self, value: list[Upload] | None) -> FileData | None:
            return FileData(path=preview_of(value[0].path), orig_name=value[0].name) if value else None

    class KeptConversation(gr.JSON):
        """Hidden component with a ``ChatState`` as value."""

        def get_block_name(self) -> str:
            return "json"

        def preprocess(self, payload: Any) -> ChatState:  # type: ignore[override]
            return parse_conversation(payload)

        def postprocess(self, value: ChatState | None) -> Any:  # type: ignore[override]
            return super().postprocess(asdict(value or ChatState()))


_ADD = (
    '<p class="mm-adding"><button type="button" class="mm-add">Add pictures</button> '
    f"or paste them; up to {MAX_IMAGES} in one question.</p>"
)


class Controls:
    """The components of a tab.

    Args:
        folder: destination of the copied examples.

    Attributes:
        claim: the tab's headline.
        settings: components of a request's settings, in the order of ``mmspec.demos.page``.
        media: list with the upload component; empty for texts.
    """

    def __init__(self, catalog: Catalog, kind: Kind, folder: Path) -> None:
        self.catalog, self.kind = catalog, kind
        self._drawn = [] if kind == "text" else media(kind, folder)
        self._photographs = photographs(self._drawn, folder) if kind == "image" else self._drawn
        self.claim = gr.HTML(views.claim_html(), elem_classes="mm-head", apply_default_css=False)
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300, elem_classes="mm-side"):
                self._add_inputs()
                with gr.Accordion("Settings", open=False):
                    self._add_settings()
                methods = self.catalog.methods(self.catalog.default_model(kind))
                self.explained = gr.HTML(views.methods_html(methods), apply_default_css=False)
            with gr.Column(scale=3, min_width=300, elem_classes="mm-results"):
                self.result = gr.HTML(
                    views.result_html([], self.prompt.value),
                    elem_classes="mm-out",
                    apply_default_css=False,
                    min_height=200,
                )

    def examples(self, model: str) -> list[Example]:
        """Examples for a model; their number is the same for all models."""
        if self.kind == "text":
            return texts(model)
        return self._photographs if plugins.sees_photographs(model) else self._drawn

    def shown(self, example: str) -> Any:
        return example if self.kind == "text" else [Upload(example, Path(example).name)]

    def _add_inputs(self) -> None:
        self.media: list[Any] = []
        model = self.catalog.default_model(self.kind)
        examples = self.examples(model)
        example = examples[0].value
        look: dict[str, Any] = {"height": 210, "buttons": [], "elem_classes": "mm-media"}
        if self.kind == "image":
            given: dict[str, Any] = {"file_types": ["image"], "columns": 4, "object_fit": "contain", **look}
            self.media = [
                ImageUpload(
                    self.shown(example),
                    label="Pictures",
                    sources=["upload", "clipboard"],
                    **given,
                )
            ]
        elif self.kind == "video":
            self.media = [VideoUpload(self.shown(example), label="Video", sources=["upload"], **look)]
        if self.kind == "image":
            gr.HTML(_ADD, apply_default_css=False)
        self.preview = gr.Button(visible="hidden", elem_classes="mm-preview")  # pressed by the page's script
        self.resume = gr.Button(visible="hidden", elem_classes="mm-resume")
        self.about = gr.HTML(views.about_html(model, self.kind, self.catalog), apply_default_css=False)
        with gr.Row(elem_classes="mm-examples"):
            self.example_buttons = [
                gr.Button(entry.label, icon=entry.icon, size="sm", elem_classes="mm-example") for entry in examples
            ]
        text = self.kind == "text"
        self.prompt = gr.Textbox(
            example if text else DEFAULT_PROMPTS[self.kind],
            label="Prompt",
            lines=1,  # with several lines, Enter would insert a line break
            max_lines=8,
            max_length=MAX_PROMPT_CHARS,
            placeholder="Ask something",
            elem_classes=["mm-prompt", *["mm-tall"] * text],
        )
        with gr.Row(elem_classes="mm-buttons"):
            self.race = gr.Button("Race", variant="primary", size="md", elem_classes="mm-go")
            self.ask = gr.Button("Ask", size="md", elem_classes="mm-ask")
            self.stop = gr.Button("Stop", size="md", elem_classes="mm-stop", interactive=False)
            self.clear = gr.Button("Clear", size="md", elem_classes="mm-clear")
        self.follow_up = gr.Checkbox(
            False, label="Follow-up question: continues the conversation", interactive=False, elem_classes="mm-follow"
        )
        self.methods = gr.CheckboxGroup(
            self.method_choices(model),
            value=self.catalog.methods(model)[:FEWEST],
            label=f"Methods to race, {FEWEST} to {MOST}",
            elem_classes="mm-methods",
        )

    def _add_settings(self) -> None:
        catalog = self.catalog  # names are checked when a request is answered
        self.model = gr.Dropdown(
            catalog.models_for(self.kind),
            value=catalog.default_model(self.kind),
            label="Model",
            info="or any hub id or folder" if catalog.open else None,
            allow_custom_value=True,
        )
        self.drafter = gr.Dropdown(
            list(catalog.drafters),
            value="auto",
            label="Method of Ask",
            info="or a drafter's hub id or folder, which can then be raced, too" if catalog.open else None,
            allow_custom_value=True,
        )
        self.temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature", info="0: always the likeliest token")
        self.seed = gr.Number(
            0,
            label="Seed",
            info="the same number repeats the same random choices; 0: another one for each conversation",
            precision=0,
            minimum=0,
        )
        self.length = gr.Slider(1, MAX_NEW_TOKENS, 256, step=1, label="Longest answer", info="in tokens")
        self.frames = gr.Slider(
            1,
            MAX_FRAMES,
            8,
            step=1,
            label="Frames",
            info="pictures taken from it, evenly",
            visible=self.kind == "video",
        )
        self.settings = [self.model, self.drafter, self.temperature, self.seed, self.length, self.frames]

    def method_choices(self, model: str, drafter: str = "auto") -> list[tuple[str, str]]:
        """Choices of the method picker: methods that the model can run, and the entered drafter."""
        names = self.catalog.methods(model)
        if drafter and drafter not in (*self.catalog.drafters, *names):
            names.append(drafter)
        return [(label(name), name) for name in names]
