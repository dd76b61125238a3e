"""The demo's page: tabs for images, videos and texts with the same controls and outputs, and links that set them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, get_args
from urllib.parse import unquote

import gradio as gr

from mmspec import plugins
from mmspec.demos import views
from mmspec.demos.catalog import FEWEST, MOST, Catalog, Examples, label
from mmspec.demos.chat_request import (
    DEFAULT_PROMPTS,
    MAX_FRAMES,
    MAX_IMAGES,
    MAX_NEW_TOKENS,
    MAX_PROMPT_CHARS,
    ChatRequest,
    ChatState,
    Kind,
    Turn,
)
from mmspec.demos.racing import Race, recording
from mmspec.demos.service import Service, add_endpoints
from mmspec.demos.storage import original_of
from mmspec.errors import UserError

_OPENING_TOKENS = 64
_LOST = "the connection to the server was lost before the answer was complete: ask again"

# Requests wait for their turn in ``RequestQueue.run``, which reports their place and limits their number.
QUEUED: dict[str, Any] = {"concurrency_limit": None, "api_visibility": "private", "show_progress": "hidden"}
UNQUEUED: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}

_NUMBERS = ("temperature", "max_new_tokens", "frames", "seed")  # of a link

Updates = dict[Any, Any]  # new values and properties of components, by component


_ADD = (
    '<p class="mm-adding"><button type="button" class="mm-add">Add pictures</button> '
    f"or paste them; up to {MAX_IMAGES} in one question.</p>"
)


def paths_of(value: Any) -> list[str]:
    """Paths of uploads and previews in the value of ``Controls.media``."""
    return [value] if isinstance(value, str) else [path for path, _ in value or ()]


def uploads_of(value: Any) -> list[str]:
    """Paths of the uploads in the value of ``Controls.media``."""
    return [original_of(path) for path in paths_of(value)]


def html(value: str, **look: Any) -> gr.HTML:
    return gr.HTML(value, apply_default_css=False, **look)


class Controls:
    """The components of a tab; ``settings`` by the fields of ``ChatRequest``, ``media`` empty for texts. Examples are
    copied to a folder."""

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
        names = dict.fromkeys([*self.catalog.methods(model), *further])
        return [(label(name), name) for name in names]


class Tab:
    def __init__(self, service: Service, kind: Kind, folder: Path) -> None:
        self.service, self.kind, self.folder = service, kind, folder
        self._running: dict[str, Event] = {}  # set to stop a request, by its id
        with gr.Tab(kind.capitalize(), id=kind) as shown:
            self.controls = controls = Controls(service.catalog, kind, folder)
        buttons = [controls.race, controls.ask, controls.stop, controls.follow_up]
        outputs = [controls.conversation, controls.result, controls.claim, *buttons]
        asked = [controls.conversation, controls.follow_up, controls.prompt, controls.methods]
        inputs = [*asked, *controls.settings.values(), *controls.media]
        race, ask = (partial(self.answer, raced) for raced in (True, False))
        raced = gr.on([controls.race.click, controls.prompt.submit], race, inputs, outputs, **QUEUED)
        answered = controls.ask.click(ask, inputs, outputs, **QUEUED)
        controls.stop.click(self.stop, controls.conversation, None, **UNQUEUED)
        opened = shown.select(self.opening, controls.conversation, outputs, **QUEUED)
        running = [raced, answered, opened]
        controls.clear.click(self.clear, None, outputs, cancels=running, **UNQUEUED)
        controls.resume.click(self.resume, controls.conversation, outputs, cancels=running, **UNQUEUED)
        for media in controls.media:
            # A separate event cancels at once; chained after the clearing, it would cancel the next request. The page
            # presses "Clear" when a gallery is emptied, as galleries have no such event.
            emptied = media.delete if isinstance(media, gr.Gallery) else media.clear
            gr.on([media.upload, emptied], None, cancels=running, api_visibility="private")
            emptied(self.clear, None, outputs, **UNQUEUED)
            media.upload(self.uploaded, media, [media, *outputs], **UNQUEUED)
            controls.preview.click(self.preview, media, media, **UNQUEUED)
        model, drafter = controls.settings["model"], controls.settings["drafter"]
        for number, button in enumerate(controls.example_buttons):
            button.click(None, cancels=running, api_visibility="private")
            filled: list[Any] = [*controls.media] or [controls.prompt]
            button.click(partial(self.example, number), model, [*filled, *outputs], **UNQUEUED)
        described = [controls.methods, controls.about, controls.explained, *controls.example_buttons]
        inputs = [model, drafter, controls.methods]
        gr.on([model.change, drafter.change], self.select, inputs, described, **UNQUEUED)

    def example(self, number: int, model: str) -> Updates:
        """Start a new conversation about an example that suits the model."""
        (filled,) = [*self.controls.media, self.controls.prompt][:1]
        return {filled: self.controls.shown(self.controls.examples.of(model)[number].value), **self.clear()}

    def uploaded(self, value: Any) -> Updates:
        """Start a new conversation about uploads; clears the selected example."""
        own = self._own(value)
        return {**self.clear(), **({self.controls.media[0]: own} if own != uploads_of(value) else {})}

    def preview(self, value: Any) -> Any:
        """Show previews of uploads, as browsers cannot show all formats. Clears the example as ``uploaded`` does, which
        may end before or after this."""
        shown = self._own(value)
        for number, upload in enumerate(shown):
            with suppress(UserError):  # the request itself reports the error
                shown[number] = self.service.preview(upload, self.kind) or upload
        if shown == paths_of(value):
            return gr.skip()
        return shown if self.kind == "image" else shown[0]

    def _own(self, value: Any) -> list[str]:
        """The visitor's own uploads; the selected example if there are none."""
        uploads = uploads_of(value)
        return [path for path in uploads if Path(path).parent != self.folder] or uploads

    def select(self, model: str, drafter: str, chosen: Sequence[str]) -> list[Any]:
        """Component updates (method picker, notes, examples) after a model was selected."""
        model = model or self.service.catalog.default_model(self.kind)
        own = [drafter] if drafter and drafter not in self.service.catalog.drafters else []
        choices = self.controls.method_choices(model, own)
        names = [name for _, name in choices]
        kept = [name for name in chosen if name in names]
        picker = gr.CheckboxGroup(choices, value=kept if len(kept) >= FEWEST else names[:FEWEST])
        about = views.about_html(model, self.kind, self.service.catalog), views.methods_html(names)
        return [picker, *about, *(gr.Button(one.label, icon=one.icon) for one in self.controls.examples.of(model))]

    def stop(self, kept: Any) -> None:
        """Stop the running request; its handler keeps the partial answer."""
        if stop := self._running.get(ChatState.parse(kept).running):
            stop.set()

    def clear(self) -> Updates:
        updates = self._state(ChatState(opened=True))
        return {**updates, self.controls.result: views.result_html(), self.controls.claim: views.claim_html()}

    def resume(self, kept: Any) -> Updates:
        """Resume a conversation after the connection was lost during a request."""
        self.stop(kept)
        conversation = replace(ChatState.parse(kept), running="")
        return {**self._state(conversation), self.controls.result: views.result_html(conversation.turns, note=_LOST)}

    def opening(self, kept: Any, request: gr.Request) -> Iterator[Updates]:
        """Show the race of the first example when a visitor without a link first opens the tab."""
        if ChatState.parse(kept).opened or "kind" in request.query_params:
            yield {self.controls.result: gr.skip()}
            return
        chat = self.opening_request()
        yield from self._stream(ChatState(), chat, self.service.opening(chat), plays=True)

    def opening_request(self) -> ChatRequest:
        first = self.controls.examples.of(self.service.catalog.default_model(self.kind))[0].value
        prompt, uploads = (first, []) if self.kind == "text" else (DEFAULT_PROMPTS[self.kind], [first])
        return ChatRequest(self.kind, prompt, uploads, max_new_tokens=_OPENING_TOKENS)

    def answer(
        self, raced: bool, kept: Any, follow_up: bool, prompt: str, methods: Sequence[str], *settings: Any
    ) -> Iterator[Updates]:
        """Answer the prompt with one drafter, or race ``methods``; in a new conversation unless it is a follow-up
        question."""
        conversation = ChatState.parse(kept)
        if conversation.running in self._running:
            yield {self.controls.result: gr.skip()}
            return
        if not follow_up:
            conversation = ChatState(opened=True)
        given = zip((*self.controls.settings, "uploads"), settings, strict=False)
        values = {name: value for name, value in given if value is not None}
        values |= {
            "kind": self.kind,
            "prompt": prompt or "",
            "uploads": uploads_of(values.get("uploads")),
            "history": conversation.history,
            "seed": values.get("seed") or conversation.seed or 1 + secrets.randbelow(2**31),
        }
        try:
            chat = ChatRequest(**values)
        except UserError as error:
            yield self._failed(conversation, error)
            return
        work = self.service.race(chat, methods) if raced else self.service.answer(chat)
        yield from self._stream(conversation, chat, work)

    def _stream(
        self, conversation: ChatState, chat: ChatRequest, work: Iterator[Race], *, plays: bool = False
    ) -> Iterator[Updates]:
        """Show a request's answers, whose replay ``plays`` automatically or not. The answer becomes a turn even if it
        was stopped."""
        conversation = replace(conversation, running="", seed=chat.seed, opened=True)
        running, stop = replace(conversation, running=secrets.token_hex(8)), Event()
        self._running[running.running] = stop
        turns, result = conversation.turns, self.controls.result
        waiting = views.result_html(turns, chat.prompt)
        race = None
        limits: str | None = None
        try:
            yield {**self._state(running), result: waiting, self.controls.claim: views.claim_html()}
            chat = self.service.with_defaults(chat)
            for race in work:
                if stop.is_set():
                    break
                if race.ahead is None and limits is None:
                    limits = self._limits(chat)
                yield {result: views.result_html(turns, chat.prompt, race, limits=limits)}
        except UserError as error:
            yield self._failed(conversation, error)
            return
        finally:
            del self._running[running.running]
            if isinstance(work, Generator):
                work.close()
        answer = max(race.lanes, key=lambda lane: len(lane.token_ids), default=None) if race is not None else None
        if race is None or answer is None or not answer.token_ids:
            yield self._failed(conversation, "Stopped before the first token.")
            return
        stopped = stop.is_set() and not (race.finished or (len(race.lanes) == 1 and answer.finished))
        example = self.controls.examples.name_of(chat.uploads[0], chat.model) if len(chat.uploads) == 1 else None
        recorded = {**recording(race.lanes, chat, example), "plays": plays and not stopped}
        yield {
            **self._state(replace(conversation, turns=[*turns, Turn.of(chat.prompt, answer.tokens, stopped)])),
            result: views.result_html(turns, chat.prompt, race, limits=limits, stopped=stopped, recorded=recorded),
            **({self.controls.claim: views.claim_html(race)} if race.finished else {}),
        }

    def _failed(self, conversation: ChatState, error: object) -> Updates:
        html = views.result_html(conversation.turns, note=str(error))
        return {**self._state(conversation), self.controls.result: html}

    def _state(self, conversation: ChatState) -> Updates:
        """Updates of the conversation, of Race, Ask and Stop, and of the switch of follow-up questions."""
        controls, idle = self.controls, not conversation.running
        follow_up = gr.Checkbox(interactive=True) if conversation.turns else gr.Checkbox(False, interactive=False)
        return {
            controls.conversation: asdict(conversation),
            controls.race: gr.Button(interactive=idle),
            controls.ask: gr.Button(interactive=idle),
            controls.stop: gr.Button(interactive=not idle),
            controls.follow_up: follow_up,
        }

    def _limits(self, chat: ChatRequest) -> str:
        """Note on an embedded model's training data unless the input is an example, and on several images for other
        models that were trained with one image per prompt; else empty."""
        if limits := plugins.limits(chat.model):
            return "" if self.controls.examples.include(chat) else limits
        if len(chat.uploads) < 2 or not self.service.models.get(chat.model).one_image:
            return ""
        return f"{chat.model} was trained with one picture in a question: its answers about several may be wrong."


def build(service: Service, folder: Path) -> tuple[gr.Blocks, Tab]:
    """Build the page and the API endpoints; returns the page, and the tab that it opens on."""
    kinds = [kind for kind in get_args(Kind) if service.catalog.models_for(kind)]
    kinds.sort(key=lambda kind: (kind == "text") != service.catalog.opens_on_text)
    with gr.Blocks(title="mmspec", analytics_enabled=False) as page:
        html(views.links_html())
        with gr.Tabs() as selected:
            tabs: dict[str, Tab] = {kind: Tab(service, kind, folder) for kind in kinds}
        fields: list[Any] = [selected]
        for tab in tabs.values():
            controls = tab.controls
            fields += [controls.result, controls.prompt, controls.methods, *controls.settings.values(), *controls.media]

        def load(request: gr.Request) -> Updates:
            return linked(tabs, selected, request.query_params)

        page.load(load, None, fields, **UNQUEUED)
        add_endpoints(page, service)
    page.queue(max_size=None, default_concurrency_limit=None)
    return page, tabs[kinds[0]]


def linked(tabs: dict[str, Tab], selected: gr.Tabs, query: Mapping[str, str]) -> Updates:
    """Apply the settings in the page's address; a page with settings shows no opening races."""
    results = [tab.controls.result for tab in tabs.values()]
    if "kind" not in query:
        return {results[0]: gr.skip()}
    methods = [unquote(name) for name in query.get("methods", "").split(",") if name][:MOST]
    try:
        given: dict[str, Any] = {name: query.get(name, "") for name in ("kind", "prompt", "model")}
        chat = ChatRequest(**given | {name: _number(query[name]) for name in _NUMBERS if name in query})
    except UserError as error:
        return dict.fromkeys(results, views.result_html(note=f"invalid link: {error}"))
    empty = dict.fromkeys(results, views.result_html())
    if chat.kind not in tabs:
        return empty
    controls, raced = tabs[chat.kind].controls, len(methods) >= FEWEST
    model = chat.model or tabs[chat.kind].service.catalog.default_model(chat.kind)
    values = {**asdict(chat), "model": model, "drafter": "auto" if raced or not methods else methods[0]}
    updates: Updates = {
        **empty,
        **{component: values[name] for name, component in controls.settings.items()},
        selected: gr.Tabs(selected=chat.kind),
        controls.prompt: chat.prompt,
        controls.result: views.result_html(note="The settings are those of the link: press Race."),
    }
    if raced:
        updates[controls.methods] = gr.CheckboxGroup(controls.method_choices(model, methods), value=methods)
    if controls.media and "example" in query:
        found = [one.value for one in controls.examples.of(model) if Path(one.value).name == query["example"]]
        updates[controls.media[0]] = controls.shown(found[0]) if found else None
    return updates


def _number(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text
