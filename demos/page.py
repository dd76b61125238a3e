"""The demo's page: tabs for images, videos and texts with the same controls and outputs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, get_args

import gradio as gr

from mmspec import plugins
from mmspec.demos import endpoints, samples, views
from mmspec.demos.chat_request import DEFAULT_PROMPTS, ChatRequest, Kind, Upload
from mmspec.demos.controls import Controls
from mmspec.demos.link import LinkSettings, parse_link
from mmspec.demos.methods import FEWEST
from mmspec.demos.racing import Race
from mmspec.demos.recording import recording
from mmspec.demos.service import Service
from mmspec.errors import UserError

_IDLE_SECONDS = 1800  # after which an idle visitor's conversation is dropped
_OPENING_TOKENS = 128
# Requests wait for their turn in ``Turns.run``, which knows their place and rejects too many of them.
_QUEUED: dict[str, Any] = {"concurrency_limit": None, "api_visibility": "private", "show_progress": "hidden"}
_UNQUEUED: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@dataclass
class Conversation:
    """State of a visitor's conversation.

    Attributes:
        turns: prompt, answer, and answer as HTML of each turn.
        seed: sampling seed of all turns; 0 until the first.
        stop: set to stop the running request; None if none runs.
    """

    turns: list[tuple[str, str, str]] = field(default_factory=list)
    seed: int = 0
    stop: Event | None = None

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
    kinds = [kind for kind in get_args(Kind) if service.catalog.models_for(kind)]
    kinds.sort(key=lambda kind: (kind == "text") != service.catalog.opens_on_text)
    with gr.Blocks(title="mmspec", analytics_enabled=False) as page:
        claim = gr.HTML(views.claim_html(), elem_id="mm-head", apply_default_css=False)
        tabs: dict[str, _Tab] = {}
        with gr.Tabs() as selected:
            for kind in kinds:
                with gr.Tab(kind.capitalize(), id=kind):
                    tabs[kind] = _Tab(service, kind, folder, claim, opened=not tabs)
        opening = _Opening(tabs, selected)
        page.load(opening.settings, None, opening.fields, **_UNQUEUED).then(
            opening.race, None, [*opening.outputs], **_QUEUED
        )
        endpoints.add_endpoints(page, service)
    page.queue(max_size=None, default_concurrency_limit=None)
    return page


class _Tab:
    """One tab and its event handlers."""

    def __init__(self, service: Service, kind: Kind, folder: Path, claim: gr.HTML, *, opened: bool) -> None:
        self.service, self.kind, self.folder = service, kind, folder
        self.controls = Controls(service.catalog, kind, folder, opened)
        self.conversation = gr.State(Conversation(), time_to_live=_IDLE_SECONDS)
        controls = self.controls
        self.outputs = [self.conversation, controls.result, claim, controls.race, controls.ask, controls.stop]
        self._connect_events()

    def _connect_events(self) -> None:
        controls = self.controls
        inputs = [self.conversation, controls.prompt, controls.methods, *controls.settings, *controls.media]
        raced = gr.on([controls.race.click, controls.prompt.submit], self.race, inputs, self.outputs, **_QUEUED)
        answered = controls.ask.click(self.ask, inputs, self.outputs, **_QUEUED)
        controls.stop.click(self.stop, self.conversation, None, **_UNQUEUED)
        running = [raced, answered]
        controls.clear.click(self.clear, None, self.outputs, cancels=running, **_UNQUEUED)
        for media in controls.media:
            # A separate event cancels at once; after the clearing it would cancel the next request.
            gr.on([media.upload, media.clear], None, cancels=running, api_visibility="private")
            gr.on([media.upload, media.clear], self.clear, None, self.outputs, **_UNQUEUED)
        for button, example in zip(controls.example_buttons, controls.examples, strict=True):
            button.click(None, cancels=running, api_visibility="private")
            shown = controls.media or [controls.prompt]
            button.click(lambda value=example.value: (value, *self.clear()), None, [*shown, *self.outputs], **_UNQUEUED)
        gr.on(
            [controls.model.change, controls.drafter.change],
            self.select,
            [controls.model, controls.drafter, controls.methods],
            [controls.methods, controls.about],
            **_UNQUEUED,
        )

    def select(self, model: str, drafter: str, chosen: Sequence[str]) -> tuple[Any, str]:
        """Updates of method picker and note for a model."""
        model = model or self.service.catalog.default_model(self.kind)
        choices = self.controls.method_choices(model, drafter)
        names = [name for _, name in choices]
        kept = [name for name in chosen if name in names]
        picked = kept if len(kept) >= FEWEST else names[:FEWEST]
        about = views.about_html(model, self.kind, self.service.catalog)
        return gr.CheckboxGroup(choices, value=picked), about

    def ask(self, conversation: Conversation, prompt: str, _: Any, *settings: Any) -> Iterator[tuple[Any, ...]]:
        """Answer the prompt with one drafter."""
        chat = self._chat_request(conversation, prompt, settings)
        answers = (Race([answer], ahead=answer.ahead) for answer in self.service.answer(chat))
        yield from self._run(conversation, chat, answers)

    def race(
        self, conversation: Conversation, prompt: str, methods: Sequence[str], *settings: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Answer the prompt with several methods."""
        chat = self._chat_request(conversation, prompt, settings)
        yield from self._run(conversation, chat, self.service.race(chat, methods))

    @staticmethod
    def stop(conversation: Conversation) -> None:
        """Stop the running request; its handler shows and keeps the partial answer."""
        if conversation.stop is not None:
            conversation.stop.set()

    @staticmethod
    def clear() -> tuple[Any, ...]:
        """Start a new conversation."""
        return Conversation(), views.result_html([]), gr.skip(), *_buttons(running=False)

    def _chat_request(self, conversation: Conversation, prompt: str, settings: tuple[Any, ...]) -> ChatRequest:
        model, drafter, temperature, seed, length, frames, *media = settings
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
            seed=int(seed or conversation.seed),
        )

    def _limits(self, chat: ChatRequest) -> str:
        """Note on what an embedded model was trained on; empty for samples and other models."""
        limits = plugins.limits(self.service.with_defaults(chat).model)
        return "" if limits is None or samples.is_sample(chat, self.folder) else limits

    def _run(self, conversation: Conversation, chat: ChatRequest, work: Iterator[Race]) -> Iterator[tuple[Any, ...]]:
        """Run a request; yields values of ``outputs``. The answer becomes a turn, also if it was stopped."""
        if conversation.stop is not None:
            yield (gr.skip(),) * len(self.outputs)
            return
        stop = Event()
        running, earlier = replace(conversation, stop=stop), conversation.history_html
        yield running, views.result_html(earlier, chat.prompt), gr.skip(), *_buttons(running=True)
        result, limits = None, ""
        try:
            limits = self._limits(chat)
            for result in work:
                if stop.is_set():
                    break
                html = views.result_html(earlier, chat.prompt, result, ahead=result.ahead, limits=limits)
                yield (gr.skip(), html, *(gr.skip(),) * 4)
        except UserError as error:
            yield conversation, views.result_html(earlier, note=str(error)), gr.skip(), *_buttons(running=False)
            return
        finally:
            work.close()  # type: ignore[attr-defined]
        yield self._finished(conversation, chat, result, limits, stopped=stop.is_set())

    def _finished(
        self, conversation: Conversation, chat: ChatRequest, race: Race | None, limits: str, stopped: bool
    ) -> tuple[Any, ...]:
        """Values of ``outputs`` at the end of a request."""
        earlier, buttons = conversation.history_html, _buttons(running=False)
        answer = max(race.lanes, key=lambda lane: len(lane.token_ids), default=None) if race is not None else None
        if race is None or answer is None or not answer.token_ids:
            note = "Stopped before the first token."
            return conversation, views.result_html(earlier, note=note), gr.skip(), *buttons
        complete = race.finished or (len(race.lanes) == 1 and answer.finished)
        stopped = stopped and not complete
        text = views.tokens_html(answer.tokens)
        turn = chat.prompt, answer.text.strip(), views.stopped_html(text) if stopped else text
        recorded = recording(race.lanes, self.service.with_defaults(chat), samples.example_of(chat, self.folder))
        html = views.result_html(earlier, chat.prompt, race, limits=limits, stopped=stopped, recorded=recorded)
        claim = views.claim_html(race) if race.finished else gr.skip()
        return replace(conversation, turns=[*conversation.turns, turn]), html, claim, *buttons

    # ------------------------------------------------------------------ the first race

    def opening(self) -> Iterator[tuple[Any, ...]]:
        """The race of the first example, which the page opens on."""
        first = self.controls.examples[0].value
        if self.kind == "text":
            chat = ChatRequest(self.kind, first, max_new_tokens=_OPENING_TOKENS)
        else:
            upload = Upload(first, Path(first).name)
            chat = ChatRequest(self.kind, DEFAULT_PROMPTS[self.kind], upload, max_new_tokens=_OPENING_TOKENS)
        yield from self._run(Conversation(), chat, self.service.opening(chat))


@dataclass
class _Opening:
    """What a visitor sees first: the first tab with its example raced, or the settings of a link."""

    tabs: dict[str, _Tab]
    selected: gr.Tabs

    @property
    def fields(self) -> list[Any]:
        """What a link may set."""
        shown: list[Any] = [self.selected]
        for tab in self.tabs.values():
            controls = tab.controls
            shown += [controls.result, controls.prompt, controls.methods, *controls.settings, *controls.media]
        return shown

    @property
    def outputs(self) -> list[Any]:
        """Outputs of the first tab."""
        return next(iter(self.tabs.values())).outputs

    def settings(self, request: gr.Request) -> Any:
        """Updates of the components that a link sets."""
        first = next(iter(self.tabs.values())).controls
        try:
            link = parse_link(request.query_params)
        except UserError as error:
            return {first.result: views.result_html([], note=str(error))}
        if link is None or link.chat.kind not in self.tabs:
            return {first.result: gr.skip() if link is None else views.result_html([])}
        return {
            first.result: views.result_html([]),
            self.selected: gr.Tabs(selected=link.chat.kind),
            **self._linked(link),
        }

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
        values = [example.value for example in controls.examples if Path(example.value).name == link.example]
        if controls.media and link.example:
            updates[controls.media[0]] = values[0] if values else None
        return updates

    def race(self, request: gr.Request) -> Iterator[tuple[Any, ...]]:
        """The opening race of the first tab; nothing for visitors with a link."""
        if "kind" in request.query_params:
            yield (gr.skip(),) * len(self.outputs)
        else:
            yield from next(iter(self.tabs.values())).opening()


def _buttons(*, running: bool) -> tuple[Any, Any, Any]:
    """Updates of Race, Ask and Stop."""
    return gr.Button(interactive=not running), gr.Button(interactive=not running), gr.Button(interactive=running)
