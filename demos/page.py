"""The demo's page: tabs for images, videos and texts with the same controls and outputs, and links that set them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, get_args
from urllib.parse import unquote

import gradio as gr

from mmspec import plugins
from mmspec.demos import endpoints, views
from mmspec.demos.catalog import FEWEST, MOST, example_of, is_sample
from mmspec.demos.chat_request import DEFAULT_PROMPTS, MAX_PROMPT_CHARS, ChatRequest, ChatState, Kind, Turn, Upload
from mmspec.demos.controls import Controls, KeptConversation
from mmspec.demos.racing import Race, recording
from mmspec.demos.service import Service
from mmspec.errors import UserError

_OPENING_TOKENS = 64
_LOST = "the connection to the server was lost before the answer was complete: ask again"

# Requests wait for their turn in ``RequestQueue.run``, which reports their place and limits their number.
QUEUED: dict[str, Any] = {"concurrency_limit": None, "api_visibility": "private", "show_progress": "hidden"}
UNQUEUED: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


class Tab:
    """A tab and its event handlers."""

    def __init__(self, service: Service, kind: Kind, folder: Path) -> None:
        self.service, self.kind, self.folder = service, kind, folder
        self._running: dict[str, Event] = {}  # set to stop a request, by its id
        with gr.Tab(kind.capitalize(), id=kind) as self.shown:
            self.controls = Controls(service.catalog, kind, folder)
            self.conversation = KeptConversation(visible=False)
        controls = self.controls
        buttons = [controls.race, controls.ask, controls.stop, controls.follow_up]
        self.outputs = [self.conversation, controls.result, controls.claim, *buttons]
        self._connect_events()

    def _connect_events(self) -> None:
        controls = self.controls
        asked = [self.conversation, controls.follow_up, controls.prompt, controls.methods]
        inputs = [*asked, *controls.settings, *controls.media]
        raced = gr.on([controls.race.click, controls.prompt.submit], self.race, inputs, self.outputs, **QUEUED)
        answered = controls.ask.click(self.ask, inputs, self.outputs, **QUEUED)
        controls.stop.click(self.stop, self.conversation, None, **UNQUEUED)
        opened = self.shown.select(self.opening, self.conversation, self.outputs, **QUEUED)
        running = [raced, answered, opened]
        controls.clear.click(self.clear, None, self.outputs, cancels=running, **UNQUEUED)
        controls.resume.click(self.resume, self.conversation, self.outputs, cancels=running, **UNQUEUED)
        for media in controls.media:
            # A separate event cancels at once; chained after the clearing, it would cancel the next request. The page
            # presses "Clear" when a gallery is emptied, as galleries have no such event.
            emptied = [media.delete] if self.kind == "image" else [media.clear]
            gr.on([media.upload, *emptied], None, cancels=running, api_visibility="private")
            gr.on(emptied, self.clear, None, self.outputs, **UNQUEUED)
            media.upload(self.uploaded, media, [media, *self.outputs], **UNQUEUED)
            controls.preview.click(self.preview, media, media, **UNQUEUED)
        for number, button in enumerate(controls.example_buttons):
            button.click(None, cancels=running, api_visibility="private")
            shown = controls.media or [controls.prompt]
            button.click(partial(self.example, number), controls.model, [*shown, *self.outputs], **UNQUEUED)
        gr.on(
            [controls.model.change, controls.drafter.change],
            self.select,
            [controls.model, controls.drafter, controls.methods],
            [controls.methods, controls.about, controls.explained, *controls.example_buttons],
            **UNQUEUED,
        )

    def example(self, number: int, model: str) -> tuple[Any, ...]:
        """Start a new conversation about an example that suits the model."""
        return self.controls.shown(self.controls.examples(model)[number].value), *self.clear()

    def uploaded(self, uploads: Sequence[Upload]) -> tuple[Any, ...]:
        """Start a new conversation about uploads; clears the selected example."""
        own = [upload for upload in uploads if Path(upload.path).parent != self.folder]
        return own if len(own) < len(uploads) else gr.skip(), *self.clear()

    def preview(self, uploads: Sequence[Upload]) -> Any:
        """Show previews of uploads, as browsers cannot show all formats."""
        for upload in uploads:
            with suppress(UserError):  # the request itself reports the error
                self.service.preview(upload, self.kind)
        return uploads

    def select(self, model: str, drafter: str, chosen: Sequence[str]) -> tuple[Any, ...]:
        """Component updates (method picker, notes, examples) after a model was selected."""
        model = model or self.service.catalog.default_model(self.kind)
        choices = self.controls.method_choices(model, drafter)
        names = [name for _, name in choices]
        kept = [name for name in chosen if name in names]
        picked = kept if len(kept) >= FEWEST else names[:FEWEST]
        about = views.about_html(model, self.kind, self.service.catalog), views.methods_html(names)
        labels = [gr.Button(example.label, icon=example.icon) for example in self.controls.examples(model)]
        return gr.CheckboxGroup(choices, value=picked), *about, *labels

    def ask(
        self, conversation: ChatState, follow_up: bool, prompt: str, _: Any, *settings: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Answer the prompt with one drafter, in a new conversation unless it is a follow-up question."""
        conversation = conversation if follow_up else conversation.restarted()
        chat = self._chat_request(conversation, prompt, settings)
        answers = (Race([answer], ahead=answer.ahead) for answer in self.service.answer(chat))
        yield from self._run(conversation, chat, answers)

    def race(
        self, conversation: ChatState, follow_up: bool, prompt: str, methods: Sequence[str], *settings: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Answer the prompt with several methods; see ``ask``."""
        conversation = conversation if follow_up else conversation.restarted()
        chat = self._chat_request(conversation, prompt, settings)
        yield from self._run(conversation, chat, self.service.race(chat, methods))

    def stop(self, conversation: ChatState) -> None:
        """Stop the running request; its handler keeps the partial answer."""
        if stop := self._running.get(conversation.running):
            stop.set()

    @staticmethod
    def clear() -> tuple[Any, ...]:
        empty = ChatState(opened=True)
        return empty, views.result_html([]), views.claim_html(), *_buttons(empty)

    def resume(self, conversation: ChatState) -> tuple[Any, ...]:
        """Resume a conversation after the connection was lost during a request."""
        self.stop(conversation)
        conversation = replace(conversation, running="")
        html = views.result_html(views.turns_html(conversation.turns), note=_LOST)
        return conversation, html, gr.skip(), *_buttons(conversation)

    def _chat_request(self, conversation: ChatState, prompt: str, settings: tuple[Any, ...]) -> ChatRequest:
        model, drafter, temperature, seed, length, frames, *media = settings
        return ChatRequest(
            kind=self.kind,
            prompt=prompt or "",
            uploads=tuple(media[0] or ()) if media else (),
            history=conversation.history,
            model=model or "",
            drafter=drafter or "",
            temperature=temperature,
            max_new_tokens=length,
            frames=frames,
            seed=int(seed or conversation.seed or 1 + secrets.randbelow(2**31)),
        )

    def _limits(self, chat: ChatRequest) -> str:
        """Note on an embedded model's training data; empty for samples and other models."""
        model = self.service.with_defaults(chat).model
        limits = plugins.limits(model)
        return "" if limits is None or is_sample(chat, self.controls.examples(model)) else limits

    def _one_image(self, chat: ChatRequest) -> str:
        """Warning about several images for models trained with one image per prompt; else empty."""
        model = self.service.with_defaults(chat).model
        if len(chat.uploads) < 2 or plugins.limits(model) or not self.service.models.get(model).one_image:
            return ""
        return f"{model} was trained with one picture in a question: its answers about several may be wrong."

    def _run(
        self, conversation: ChatState, chat: ChatRequest, work: Iterator[Race], *, plays: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Run a request; yields values of ``outputs``. The answer becomes a turn even if it was stopped.

        Args:
            plays: whether the replay starts automatically.
        """
        if conversation.running in self._running:
            yield (gr.skip(),) * len(self.outputs)
            return
        conversation = replace(conversation, running="", seed=chat.seed, opened=True)
        running, stop = replace(conversation, running=secrets.token_hex(8)), Event()
        self._running[running.running] = stop
        earlier = views.turns_html(conversation.turns)
        result, limits = None, ""
        try:
            yield running, views.result_html(earlier, chat.prompt), views.claim_html(), *_buttons(running)
            limits = self._limits(chat)
            for result in work:
                if stop.is_set():
                    break
                limits = limits or (self._one_image(chat) if result.lanes else "")
                html = views.result_html(earlier, chat.prompt, result, ahead=result.ahead, limits=limits)
                yield (gr.skip(), html, *(gr.skip(),) * (len(self.outputs) - 2))
        except UserError as error:
            yield conversation, views.result_html(earlier, note=str(error)), gr.skip(), *_buttons(conversation)
            return
        finally:
            del self._running[running.running]
            work.close()  # type: ignore[attr-defined]
        yield self._finished(conversation, chat, result, limits, stopped=stop.is_set(), plays=plays)

    def _finished(
        self,
        conversation: ChatState,
        chat: ChatRequest,
        race: Race | None,
        limits: str,
        *,
        stopped: bool,
        plays: bool,
    ) -> tuple[Any, ...]:
        """Values of ``outputs`` at the end of a request."""
        earlier = views.turns_html(conversation.turns)
        answer = max(race.lanes, key=lambda lane: len(lane.token_ids), default=None) if race is not None else None
        if race is None or answer is None or not answer.token_ids:
            note = "Stopped before the first token."
            return conversation, views.result_html(earlier, note=note), gr.skip(), *_buttons(conversation)
        complete = race.finished or (len(race.lanes) == 1 and answer.finished)
        stopped = stopped and not complete
        asked = self.service.with_defaults(chat)
        example = example_of(chat, self.controls.examples(asked.model))
        recorded = {**recording(race.lanes, asked, example), "plays": plays and not stopped}
        html = views.result_html(earlier, chat.prompt, race, limits=limits, stopped=stopped, recorded=recorded)
        claim = views.claim_html(race) if race.finished else gr.skip()
        conversation = conversation.with_turn(Turn.of(chat.prompt, answer.tokens, stopped))
        return conversation, html, claim, *_buttons(conversation)

    def opening(self, conversation: ChatState, request: gr.Request) -> Iterator[tuple[Any, ...]]:
        """Show the race of the first example when a visitor without a link first opens the tab."""
        if conversation.opened or "kind" in request.query_params:
            yield (gr.skip(),) * len(self.outputs)
            return
        chat = self.opening_request()
        yield from self._run(ChatState(), chat, self.service.opening(chat), plays=True)

    def opening_request(self) -> ChatRequest:
        first = self.controls.examples(self.service.catalog.default_model(self.kind))[0].value
        if self.kind == "text":
            return ChatRequest(self.kind, first, max_new_tokens=_OPENING_TOKENS)
        shown = self.controls.shown(first)
        return ChatRequest(self.kind, DEFAULT_PROMPTS[self.kind], shown, max_new_tokens=_OPENING_TOKENS)


def _buttons(conversation: ChatState) -> tuple[Any, ...]:
    """Updates of Race, Ask, Stop and the switch of follow-up questions."""
    idle = not conversation.running
    follow_up = gr.Checkbox(interactive=True) if conversation.turns else gr.Checkbox(False, interactive=False)
    return gr.Button(interactive=idle), gr.Button(interactive=idle), gr.Button(interactive=not idle), follow_up


@dataclass(frozen=True)
class LinkSettings:
    """Settings encoded in a link.

    Attributes:
        chat: the request, without its upload.
        methods: methods that answered it.
        example: file name of the example, or empty.
    """

    chat: ChatRequest
    methods: tuple[str, ...]
    example: str


def parse_link(query: Mapping[str, str]) -> LinkSettings | None:
    """Parse the settings of a URL query; None without settings. Other parameters are ignored.

    Raises:
        UserError: a setting is malformed or out of range.
    """
    if "kind" not in query:
        return None
    if query["kind"] not in get_args(Kind):
        raise UserError(f"kind in the link must be one of {', '.join(get_args(Kind))}: got {query['kind']!r}")
    chat = ChatRequest(
        kind=query["kind"],  # type: ignore[arg-type]
        prompt=query.get("prompt", "")[:MAX_PROMPT_CHARS],
        model=query.get("model", ""),
        temperature=_number(query, "temperature", 0.0),
        max_new_tokens=int(_number(query, "max_new_tokens", 256)),
        frames=int(_number(query, "frames", 8)),
        seed=int(_number(query, "seed", 0)),
    )
    chat.generate_kwargs()
    methods = tuple(unquote(name) for name in query.get("methods", "").split(",") if name)[:MOST]
    return LinkSettings(chat, methods, query.get("example", ""))


def _number(query: Mapping[str, str], name: str, default: float) -> float:
    try:
        number = float(query.get(name, default))
    except ValueError:
        number = float("nan")
    if not abs(number) <= 2**53:
        raise UserError(f"{name} in the link must be a number: got {query[name]!r}")
    return number


def build(service: Service, folder: Path) -> tuple[gr.Blocks, Tab]:
    """Build the page and the API endpoints; returns the page, and the tab that it opens on."""
    kinds = [kind for kind in get_args(Kind) if service.catalog.models_for(kind)]
    kinds.sort(key=lambda kind: (kind == "text") != service.catalog.opens_on_text)
    with gr.Blocks(title="mmspec", analytics_enabled=False) as page:
        gr.HTML(views.links_html(), apply_default_css=False)
        with gr.Tabs() as selected:
            tabs: dict[str, Tab] = {kind: Tab(service, kind, folder) for kind in kinds}
        link = _Link(tabs, selected)
        page.load(link.settings, None, link.fields, **UNQUEUED)
        endpoints.add_endpoints(page, service)
    page.queue(max_size=None, default_concurrency_limit=None)
    return page, tabs[kinds[0]]


@dataclass
class _Link:
    """Applies the settings of a link when the page loads."""

    tabs: dict[str, Tab]
    selected: gr.Tabs

    @property
    def fields(self) -> list[Any]:
        """Components that a link may set."""
        shown: list[Any] = [self.selected]
        for tab in self.tabs.values():
            controls = tab.controls
            shown += [controls.result, controls.prompt, controls.methods, *controls.settings, *controls.media]
        return shown

    def settings(self, request: gr.Request) -> Any:
        """Component updates for a link; also disables opening races."""
        results = [tab.controls.result for tab in self.tabs.values()]
        try:
            link = parse_link(request.query_params)
        except UserError as error:
            return dict.fromkeys(results, views.result_html([], note=str(error)))
        if link is None:
            return {results[0]: gr.skip()}
        empty = dict.fromkeys(results, views.result_html([]))
        if link.chat.kind not in self.tabs:
            return empty
        return {**empty, self.selected: gr.Tabs(selected=link.chat.kind), **self._linked(link)}

    def _linked(self, link: LinkSettings) -> dict[Any, Any]:
        tab, chat = self.tabs[link.chat.kind], link.chat
        controls, raced = tab.controls, len(link.methods) >= FEWEST
        model = chat.model or tab.service.catalog.default_model(chat.kind)
        drafter = "auto" if raced or not link.methods else link.methods[0]
        choices = controls.method_choices(model, drafter)
        names = {name for _, name in choices}
        choices += [(views.label(name), name) for name in link.methods if raced and name not in names]
        updates: dict[Any, Any] = {
            controls.prompt: chat.prompt,
            controls.model: model,
            controls.drafter: drafter,
            controls.temperature: chat.temperature,
            controls.seed: chat.seed,
            controls.length: chat.max_new_tokens,
            controls.frames: chat.frames,
            controls.methods: gr.CheckboxGroup(choices, value=list(link.methods)) if raced else gr.skip(),
            controls.result: views.result_html([], note="The settings are those of the link: press Race."),
        }
        values = [example.value for example in controls.examples(model) if Path(example.value).name == link.example]
        if controls.media and link.example:
            updates[controls.media[0]] = controls.shown(values[0]) if values else []
        return updates
