"""Components of a tab: inputs on the left, the result on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.demos import views
from mmspec.demos.catalog import FEWEST, MOST, Catalog, Examples, label
from mmspec.demos.chat_request import (
    DEFAULT_PROMPTS,
    MAX_FRAMES,
    MAX_IMAGES,
    MAX_NEW_TOKENS,
    MAX_PROMPT_CHARS,
    ChatState,
    Kind,
)
from mmspec.demos.storage import original_of

_ADD = (
    '<p class="mm-adding"><button type="button" class="mm-add">Add pictures</button> '
    f"or paste them; up to {MAX_IMAGES} in one question.</p>"
)


def uploads_of(value: Any) -> list[str]:
    """Paths of the uploads in the value of ``Controls.media``."""
    paths = [value] if isinstance(value, str) else [path for path, _ in value or ()]
    return [original_of(path) for path in paths]


def html(value: str, **look: Any) -> gr.HTML:
    return gr.HTML(value, apply_default_css=False, **look)


class Controls:
    """The components of a tab.

    Args:
        folder: destination of the copied examples.

    Attributes:
        claim: the tab's headline.
        settings: components of a request's settings, by the fields of ``ChatRequest``.
        media: list with the upload component; empty for texts.
    """

    def __init__(self, catalog: Catalog, kind: Kind, folder: Path) -> None:
        self.catalog, self.kind = catalog, kind
        self.examples = Examples(kind, folder)
        self.claim = html(views.claim_html(), elem_classes="mm-head")
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300, elem_classes="mm-side"):
                self._add_inputs()
                with gr.Accordion("Settings", open=False):
                    self._add_settings()
                self.explained = html(views.methods_html(catalog.methods(catalog.default_model(kind))))
            with gr.Column(scale=3, min_width=300, elem_classes="mm-results"):
                empty = views.result_html(prompt=self.prompt.value)
                self.result = html(empty, elem_classes="mm-out", min_height=200)
        self.conversation = gr.JSON(asdict(ChatState()), visible=False)

    def shown(self, example: str) -> Any:
        """Value of the prompt or upload component for an example."""
        return [example] if self.kind == "image" else example

    def _add_inputs(self) -> None:
        model = self.catalog.default_model(self.kind)
        examples = self.examples.of(model)
        shown = self.shown(examples[0].value)
        look: dict[str, Any] = {"height": 210, "buttons": [], "elem_classes": "mm-media"}
        self.media: list[gr.Gallery | gr.Video] = []
        if self.kind == "image":
            look |= {"type": "filepath", "file_types": ["image"], "columns": 4, "object_fit": "contain"}
            self.media = [gr.Gallery(shown, label="Pictures", sources=["upload", "clipboard"], **look)]
            html(_ADD)
        elif self.kind == "video":
            self.media = [gr.Video(shown, label="Video", sources=["upload"], **look)]
        self.preview = gr.Button(visible="hidden", elem_classes="mm-preview")  # pressed by the page's script
        self.resume = gr.Button(visible="hidden", elem_classes="mm-resume")
        self.about = html(views.about_html(model, self.kind, self.catalog))
        with gr.Row(elem_classes="mm-examples"):
            self.example_buttons = [
                gr.Button(entry.label, icon=entry.icon, size="sm", elem_classes="mm-example") for entry in examples
            ]
        self.prompt = gr.Textbox(
            shown if self.kind == "text" else DEFAULT_PROMPTS[self.kind],
            label="Prompt",
            lines=1,  # with several lines, Enter would insert a line break
            max_lines=8,
            max_length=MAX_PROMPT_CHARS,
            placeholder="Ask something",
            elem_classes=["mm-prompt", *["mm-tall"] * (self.kind == "text")],
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
        catalog, further = self.catalog, "or any hub id or folder" if self.catalog.open else None
        own = "or a drafter's hub id or folder, which can then be raced, too" if catalog.open else None
        repeats = "the same number repeats the same random choices; 0: another one for each conversation"
        custom: dict[str, Any] = {"allow_custom_value": True}  # names are checked when a request is answered
        models, model = catalog.models_for(self.kind), catalog.default_model(self.kind)
        frames: dict[str, Any] = {"info": "pictures taken from it, evenly", "visible": self.kind == "video"}
        self.settings: dict[str, Any] = {
            "model": gr.Dropdown(models, value=model, label="Model", info=further, **custom),
            "drafter": gr.Dropdown(list(catalog.drafters), value="auto", label="Method of Ask", info=own, **custom),
            "temperature": gr.Slider(0, 2, 0, step=0.1, label="Temperature", info="0: always the likeliest token"),
            "seed": gr.Number(0, label="Seed", info=repeats, precision=0, minimum=0),
            "max_new_tokens": gr.Slider(1, MAX_NEW_TOKENS, 256, step=1, label="Longest answer", info="in tokens"),
            "frames": gr.Slider(1, MAX_FRAMES, 8, step=1, label="Frames", **frames),
        }

    def method_choices(self, model: str, further: Sequence[str] = ()) -> list[tuple[str, str]]:
        """Choices of the method picker: methods that the model can run, and further methods."""
        names = dict.fromkeys([*self.catalog.methods(model), *further])
        return [(label(name), name) for name in names]
