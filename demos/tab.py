"""A tab of the demo's page: its conversation and event handlers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr

from mmspec import plugins
from mmspec.demos import notes, samples, views
from mmspec.demos.chat_request import DEFAULT_PROMPTS, ChatRequest, Kind, Upload
from mmspec.demos.controls import Controls
from mmspec.demos.conversation import Conversation, KeptConversation, Turn
from mmspec.demos.methods import FEWEST
from mmspec.demos.racing import Race
from mmspec.demos.service import Service
from mmspec.demos.streaming import recording
from mmspec.errors import UserError

_OPENING_TOKENS = 64
_LOST = "the connection to the server was lost before the answer was complete: ask again"
# Requests wait for their turn in ``Turns.run``, which knows their place and rejects too many of them.
QUEUED: dict[str, Any] = {"concurrency_limit": None, "api_visibility": "private", "show_progress": "hidden"}
UNQUEUED: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


class Tab:
    """One tab and its event handlers."""

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
            # A separate event cancels at once; after the clearing it would cancel the next request. The page presses
            # "Clear" when a gallery is emptied, which has no event for it.
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
        """Start a new conversation about uploads, which replace an example."""
        own = [upload for upload in uploads if Path(upload.path).parent != self.folder]
        return own if len(own) < len(uploads) else gr.skip(), *self.clear()

    def preview(self, uploads: Sequence[Upload]) -> Any:
        """Show uploads, some of which the browser cannot show, by previews."""
        for upload in uploads:
            with suppress(UserError):  # which the request itself will report
                self.service.preview(upload, self.kind)
        return uploads

    def select(self, model: str, drafter: str, chosen: Sequence[str]) -> tuple[Any, ...]:
        """Updates of method picker, notes and examples for a model."""
        model = model or self.service.catalog.default_model(self.kind)
        choices = self.controls.method_choices(model, drafter)
        names = [name for _, name in choices]
        kept = [name for name in chosen if name in names]
        picked = kept if len(kept) >= FEWEST else names[:FEWEST]
        notes_html = notes.about_html(model, self.kind, self.service.catalog), notes.methods_html(names)
        labels = [gr.Button(example.label, icon=example.icon) for example in self.controls.examples(model)]
        return gr.CheckboxGroup(choices, value=picked), *notes_html, *labels

    def ask(
        self, conversation: Conversation, follow_up: bool, prompt: str, _: Any, *settings: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Answer the prompt with one drafter, in a new conversation unless it is a follow-up question."""
        conversation = conversation if follow_up else conversation.restarted()
        chat = self._chat_request(conversation, prompt, settings)
        answers = (Race([answer], ahead=answer.ahead) for answer in self.service.answer(chat))
        yield from self._run(conversation, chat, answers)

    def race(
        self, conversation: Conversation, follow_up: bool, prompt: str, methods: Sequence[str], *settings: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Answer the prompt with several methods; see ``ask``."""
        conversation = conversation if follow_up else conversation.restarted()
        chat = self._chat_request(conversation, prompt, settings)
        yield from self._run(conversation, chat, self.service.race(chat, methods))

    def stop(self, conversation: Conversation) -> None:
        """Stop the running request; its handler shows and keeps the partial answer."""
        if stop := self._running.get(conversation.running):
            stop.set()

    @staticmethod
    def clear() -> tuple[Any, ...]:
        empty = Conversation(opened=True)
        return empty, views.result_html([]), gr.skip(), *_buttons(empty)

    def resume(self, conversation: Conversation) -> tuple[Any, ...]:
        """Go on after the connection was lost while a request ran."""
        self.stop(conversation)
        conversation = replace(conversation, running="")
        html = views.result_html(views.turns_html(conversation.turns), note=_LOST)
        return conversation, html, gr.skip(), *_buttons(conversation)

    def _chat_request(self, conversation: Conversation, prompt: str, settings: tuple[Any, ...]) -> ChatRequest:
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
        """Note on what an embedded model was trained on; empty for samples and other models."""
        model = self.service.with_defaults(chat).model
        limits = plugins.limits(model)
        return "" if limits is None or samples.is_sample(chat, self.controls.examples(model)) else limits

    def _one_image(self, chat: ChatRequest) -> str:
        """Note on several images for a loaded model that was trained with one in a prompt; else empty."""
        model = self.service.with_defaults(chat).model
        if len(chat.uploads) < 2 or plugins.limits(model) or not self.service.models.get(model).one_image:
            return ""
        return f"{model} was trained with one picture in a question: its answers about several may be wrong."

    def _run(
        self, conversation: Conversation, chat: ChatRequest, work: Iterator[Race], *, plays: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Run a request; yields values of ``outputs``. The answer becomes a turn, also if it was stopped.

        Args:
            plays: whether the replay plays by itself.
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
            yield running, views.result_html(earlier, chat.prompt), gr.skip(), *_buttons(running)
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
        conversation: Conversation,
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
        example = samples.example_of(chat, self.controls.examples(asked.model))
        recorded = {**recording(race.lanes, asked, example), "plays": plays and not stopped}
        html = views.result_html(earlier, chat.prompt, race, limits=limits, stopped=stopped, recorded=recorded)
        claim = views.claim_html(race) if race.finished else gr.skip()
        conversation = conversation.with_turn(Turn.of(chat.prompt, answer.tokens, stopped))
        return conversation, html, claim, *_buttons(conversation)

    def opening(self, conversation: Conversation, request: gr.Request) -> Iterator[tuple[Any, ...]]:
        """The race of the first example, when a visitor without a link first sees the tab."""
        if conversation.opened or "kind" in request.query_params:
            yield (gr.skip(),) * len(self.outputs)
            return
        chat = self.opening_request()
        yield from self._run(Conversation(), chat, self.service.opening(chat), plays=True)

    def opening_request(self) -> ChatRequest:
        first = self.controls.examples(self.service.catalog.default_model(self.kind))[0].value
        if self.kind == "text":
            return ChatRequest(self.kind, first, max_new_tokens=_OPENING_TOKENS)
        shown = self.controls.shown(first)
        return ChatRequest(self.kind, DEFAULT_PROMPTS[self.kind], shown, max_new_tokens=_OPENING_TOKENS)


def _buttons(conversation: Conversation) -> tuple[Any, ...]:
    """Updates of Race, Ask, Stop and the switch of follow-up questions."""
    idle = not conversation.running
    follow_up = gr.Checkbox(interactive=True) if conversation.turns else gr.Checkbox(False, interactive=False)
    return gr.Button(interactive=idle), gr.Button(interactive=idle), gr.Button(interactive=not idle), follow_up
