"""The demo's page: tabs for images, videos and text with the same controls and outputs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from demos import endpoints, samples, views
from demos.answer_details import AnswerDetails, answer_details, plots_html, tree_html
from demos.chat_request import DEFAULT_PROMPTS, MAX_FRAMES, MAX_NEW_TOKENS, MAX_PROMPT_CHARS, ChatRequest, Kind
from demos.models import RUNNING
from demos.service import Service
from demos.streaming import StreamedAnswer
from demos.uploads import ImageUpload, VideoUpload
from mmspec import plugins
from mmspec.errors import UserError

TITLE = (
    "<h1>mmspec</h1><p>The model's own answer, sooner: a small drafter proposes several tokens ahead, and the model "
    "verifies all of them in one pass. What you read is what the model alone would have written.</p>"
)
_DETAILS = "<h2>Draft trees <span>of the latest speculative answer, pass by pass; hover over a node</span></h2>"
_IDLE_SECONDS = 1800  # after which an idle visitor's conversation is dropped
_MODEL_QUEUE: dict[str, Any] = {
    "concurrency_id": "model",
    "concurrency_limit": RUNNING,
    "api_visibility": "private",
}
_EXAMPLES: dict[str, Any] = {"label": "Examples", "api_visibility": "private"}
_UNQUEUED: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@dataclass
class Conversation:
    """State of a visitor's conversation.

    Attributes:
        turns: prompt, answer, and answer as HTML of each turn.
        details: those of the latest speculative answer.
        seed: sampling seed of all turns; 0 until the first.
    """

    turns: list[tuple[str, str, str]] = field(default_factory=list)
    details: AnswerDetails | None = None
    seed: int = 0

    @property
    def history(self) -> list[tuple[str, str]]:
        return [(prompt, answer) for prompt, answer, _ in self.turns]

    @property
    def history_html(self) -> list[tuple[str, str]]:
        return [(prompt, html) for prompt, _, html in self.turns]


def build(service: Service, folder: Path) -> gr.Blocks:
    """Build the page and the API endpoints.

    Args:
        service: answers the requests.
        folder: where example media are rendered.
    """
    with gr.Blocks(title="mmspec", analytics_enabled=False) as page:
        gr.HTML(TITLE, elem_id="mm-head")
        for kind in get_args(Kind):
            with gr.Tab(kind.capitalize(), id=kind):
                _Tab(service, kind, folder)
        endpoints.add_endpoints(service, _MODEL_QUEUE)
    page.queue(max_size=4 * RUNNING, default_concurrency_limit=1)
    return page


class _Tab:
    """One tab: inputs on the left, outputs on the right."""

    def __init__(self, service: Service, kind: Kind, folder: Path) -> None:
        self.service, self.kind, self.folder = service, kind, folder
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300, elem_classes="mm-side"):
                self._add_media()
                self._add_prompt()
                with gr.Accordion("Settings", open=False):
                    self._add_settings()
            with gr.Column(scale=3, min_width=300):
                self._add_outputs()
        self._connect_events()

    def _add_media(self) -> None:
        self.media: Any = None
        if self.kind == "image":
            sources: Any = ["upload", "clipboard"]
            self.media = ImageUpload(label="Image", type="filepath", sources=sources, height=280, buttons=[])
            gr.Examples([[path] for path in samples.sample_images(self.folder)], [self.media], **_EXAMPLES)
        elif self.kind == "video":
            self.media = VideoUpload(label="Video", sources=["upload"], height=280, buttons=[])
            gr.Examples([[path] for path in samples.sample_videos(self.folder)], [self.media], **_EXAMPLES)

    def _add_prompt(self) -> None:
        text = self.kind == "text"
        self.prompt = gr.Textbox(
            DEFAULT_PROMPTS[self.kind],
            label="Prompt",
            lines=4 if text else 1,
            max_lines=8,
            max_length=MAX_PROMPT_CHARS,
            placeholder="Ask something",
            elem_classes="mm-prompt",
        )
        if text:
            examples, labels = [[prompt] for prompt in samples.TEXTS.values()], list(samples.TEXTS)
            gr.Examples(examples, [self.prompt], example_labels=labels, **_EXAMPLES)
        with gr.Row(elem_classes="mm-buttons"):
            self.ask = gr.Button("Ask", variant="primary", size="md", elem_classes="mm-ask")
            self.race = gr.Button("Race", size="md", elem_classes="mm-go")
            self.stop = gr.Button("Stop", size="md", elem_classes="mm-stop")
            self.clear = gr.Button("Clear", size="md", elem_classes="mm-clear")

    def _add_settings(self) -> None:
        catalog = self.service.catalog  # names are checked when a request is answered
        self.model = gr.Dropdown(
            list(catalog.models),
            value=catalog.default_model(self.kind),
            label="Model",
            info="or any hub id or folder" if catalog.open else None,
            allow_custom_value=True,
        )
        self.drafter = gr.Dropdown(
            list(catalog.drafters),
            value="auto",
            label="Drafter",
            info="or a checkpoint's hub id or folder" if catalog.open else None,
            allow_custom_value=True,
        )
        self.temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature", info="0 is greedy")
        self.length = gr.Slider(1, MAX_NEW_TOKENS, 256, step=1, label="Max new tokens")
        self.frames = gr.Slider(
            1, MAX_FRAMES, 8, step=1, label="Frames", info="sampled evenly", visible=self.kind == "video"
        )

    def _add_outputs(self) -> None:
        self.conversation = gr.State(Conversation(), time_to_live=_IDLE_SECONDS)
        with gr.Tabs() as self.tabs:
            with gr.Tab("Answer", id="answer"):
                self.answer = gr.HTML(
                    views.conversation_html([], "", None), elem_classes="mm-out mm-answer", apply_default_css=False
                )
            with gr.Tab("Side by side", id="race"):
                self.lanes = gr.HTML(views.race_html(None), elem_classes="mm-out mm-race", apply_default_css=False)
        with gr.Column(visible=False, elem_classes="mm-inside") as self.details:
            gr.HTML(_DETAILS, apply_default_css=False)
            self.step = gr.Slider(1, 2, 1, step=1, label="Pass", elem_classes="mm-step")
            self.tree = gr.HTML(elem_classes="mm-tree-view", apply_default_css=False)
            self.plots = gr.HTML(elem_classes="mm-plots-view", apply_default_css=False)

    def _connect_events(self) -> None:
        settings = [self.model, self.drafter, self.temperature, self.length, self.frames]
        media = [self.media] if self.media is not None else []
        inputs = [self.conversation, self.prompt, *settings, *media]
        details = [self.details, self.step, self.tree, self.plots]
        asked = gr.on(
            [self.ask.click, self.prompt.submit],
            self._ask,
            inputs,
            [self.conversation, self.answer, self.tabs, *details],
            show_progress="minimal",
            show_progress_on=self.answer,
            **_MODEL_QUEUE,
        )
        raced = self.race.click(
            self._race,
            inputs,
            [self.conversation, self.lanes, self.tabs, *details],
            show_progress="minimal",
            show_progress_on=self.lanes,
            **_MODEL_QUEUE,
        )
        self.stop.click(None, cancels=[asked, raced], api_visibility="private")
        cleared = [self.conversation, self.answer, self.lanes, self.details]
        self.clear.click(self._clear, None, cleared, cancels=[asked, raced], **_UNQUEUED)
        if self.media is not None:
            # A separate event cancels at once; after the clearing it would cancel the next request.
            self.media.change(None, cancels=[asked, raced], api_visibility="private")
            self.media.change(self._clear, None, cleared, **_UNQUEUED)
        self.step.input(
            self._show_step, [self.conversation, self.step], self.tree, trigger_mode="always_last", **_UNQUEUED
        )

    def _chat_request(self, conversation: Conversation, prompt: str, settings: tuple[Any, ...]) -> ChatRequest:
        model, drafter, temperature, length, frames, *media = settings
        if not conversation.seed:
            conversation.seed = 1 + secrets.randbelow(2**31)
        return ChatRequest(
            kind=self.kind,
            prompt=prompt or "",
            upload=media[0] if media else None,
            history=conversation.history,
            model=model or "",
            drafter=drafter or "",
            temperature=temperature,
            max_new_tokens=length,
            frames=frames,
            seed=conversation.seed,
        )

    def _limits(self, chat: ChatRequest) -> str:
        """Note on what an embedded model was trained on; empty for samples and other models."""
        limits = plugins.limits(self.service.with_defaults(chat).model)
        return "" if limits is None or samples.is_sample(chat, self.folder) else limits

    def _ask(self, conversation: Conversation, prompt: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        def html(answer: StreamedAnswer | None, note: str = "", limits: str = "") -> str:
            return views.conversation_html(conversation.history_html, "" if note else prompt, answer, note, limits)

        chat = self._chat_request(conversation, prompt, settings)
        answer, final = yield from self._stream("answer", self.service.answer, conversation, chat, html)
        if answer is not None:
            turn = prompt, answer.text.strip(), views.tokens_html(answer.tokens)
            details = answer_details(answer)
            updated = replace(conversation, turns=[*conversation.turns, turn], details=details)
            yield updated, final, gr.skip(), *_details_updates(details)

    def _race(self, conversation: Conversation, prompt: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        chat = replace(self._chat_request(conversation, prompt, settings), history=[])
        race, final = yield from self._stream("race", self.service.race, conversation, chat, views.race_html)
        if race is not None:
            details = answer_details(race.speculative)
            yield replace(conversation, details=details), final, gr.skip(), *_details_updates(details)

    def _stream(
        self,
        tab: str,
        start: Callable[[ChatRequest], Iterator[Any]],
        conversation: Conversation,
        chat: ChatRequest,
        html: Callable[..., str],
    ) -> Generator[tuple[Any, ...], None, tuple[Any, str]]:
        """Run a request; yields the page's updates, and returns the complete result with its HTML.

        The result is None after an error, or if another request cancelled this one.
        """
        begin, rest = (gr.Tabs(selected=tab), gr.Column(visible=False)), (gr.skip(),) * 3
        result, limits = None, ""
        try:
            yield conversation, html(None), *begin, *rest
            limits = self._limits(chat)
            for result in start(chat):
                if not result.finished:
                    yield conversation, html(result, limits=limits), gr.skip(), gr.skip(), *rest
        except UserError as error:
            yield conversation, html(None, str(error)), *begin, *rest
            return None, ""
        return (result, html(result, limits=limits)) if result is not None and result.finished else (None, "")

    @staticmethod
    def _show_step(conversation: Conversation, number: int) -> str:
        return tree_html(conversation.details, number)

    @staticmethod
    def _clear() -> tuple[Any, ...]:
        return Conversation(), views.conversation_html([], "", None), views.race_html(None), gr.Column(visible=False)


def _details_updates(details: AnswerDetails | None) -> tuple[Any, Any, str, str]:
    """Updates of the column, slider, tree and plots of an answer's details."""
    if details is None:
        return gr.Column(visible=False), gr.skip(), "", ""
    last, best = len(details.steps), details.best_step
    slider = gr.Slider(minimum=1, maximum=max(last, 2), value=best, visible=last > 1, label=f"Pass (1 to {last})")
    return gr.Column(visible=True), slider, tree_html(details, best), plots_html(details)
