"""The page: a panel for images, one for videos, one for text, each with the same views."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from demos import endpoints, samples, views
from demos.inside import Inside, inside_of, plots_html, step_html
from demos.questions import LONGEST_PROMPT, MOST_FRAMES, MOST_TOKENS, PROMPTS, Kind, Question
from demos.service import Service
from demos.uploads import Film, Picture
from mmspec import plugins
from mmspec.errors import UserError

TITLE = (
    "<h1>mmspec</h1><p>The model's own answer, sooner: a small drafter guesses several tokens ahead, and the model "
    "checks all of its guesses in one pass. What you read is what the model alone would have written.</p>"
)
_LOOK = "<h2>Look inside <span>the latest speculative run, pass by pass; rest the pointer on a node</span></h2>"
_KEPT = 1800  # seconds that an idle visitor's conversation stays in memory
_TOGETHER: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
_EXAMPLES: dict[str, Any] = {"label": "Examples", "api_visibility": "private"}
_AT_ONCE: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@dataclass
class Talk:
    """A visitor's conversation: questions, answers, answers as HTML, and what can be looked into of the latest run."""

    turns: list[tuple[str, str, str]] = field(default_factory=list)
    inside: Inside | None = None
    seed: int = 0

    @property
    def earlier(self) -> list[tuple[str, str]]:
        return [(question, answer) for question, answer, _ in self.turns]

    @property
    def shown(self) -> list[tuple[str, str]]:
        return [(question, html) for question, _, html in self.turns]


def build(service: Service, folder: Path) -> gr.Blocks:
    """The page and the named endpoints.

    Args:
        service: what answers.
        folder: where samples are drawn.
    """
    with gr.Blocks(title="mmspec", analytics_enabled=False) as page:
        gr.HTML(TITLE, elem_id="mm-head")
        for kind in get_args(Kind):
            with gr.Tab(kind.capitalize(), id=kind):
                _Panel(service, kind, folder)
        endpoints.add(service, _TOGETHER)
    page.queue(max_size=16, default_concurrency_limit=1)
    return page


class _Panel:
    """One tab: what is asked on the left, what comes of it on the right."""

    def __init__(self, service: Service, kind: Kind, folder: Path) -> None:
        self.service, self.kind, self.folder = service, kind, folder
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300, elem_classes="mm-side"):
                self._asking()
            with gr.Column(scale=3, min_width=300):
                self._showing()
        self._connect()

    def _asking(self) -> None:
        kind, folder, offer = self.kind, self.folder, self.service.offer
        self.media: Any = None
        if kind == "image":
            sources: Any = ["upload", "clipboard"]
            self.media = Picture(label="Image", type="filepath", sources=sources, height=280, buttons=[])
            gr.Examples([[path] for path in samples.pictures(folder)], [self.media], **_EXAMPLES)
        elif kind == "video":
            self.media = Film(label="Video", sources=["upload"], height=280, buttons=[])
            gr.Examples([[path] for path in samples.films(folder)], [self.media], **_EXAMPLES)
        self.prompt = gr.Textbox(
            PROMPTS[kind],
            label="Prompt",
            lines=4 if kind == "text" else 1,
            max_lines=8,
            max_length=LONGEST_PROMPT,
            placeholder="Ask something",
            elem_classes="mm-prompt",
        )
        if kind == "text":
            gr.Examples(
                [[text] for text in samples.TEXTS.values()],
                [self.prompt],
                example_labels=list(samples.TEXTS),
                **_EXAMPLES,
            )
        with gr.Row(elem_classes="mm-buttons"):
            self.ask = gr.Button("Ask", variant="primary", size="md", elem_classes="mm-ask")
            self.race = gr.Button("Race", size="md", elem_classes="mm-go")
            self.stop = gr.Button("Stop", size="md", elem_classes="mm-stop")
            self.clear = gr.Button("Clear", size="md", elem_classes="mm-clear")
        with gr.Accordion("Settings", open=False):
            # Names are checked where questions are answered, for the page and the endpoints alike.
            self.model = gr.Dropdown(
                list(offer.models),
                value=offer.model_for(kind),
                label="Model",
                info="or any hub id or folder" if offer.open else None,
                allow_custom_value=True,
            )
            self.drafter = gr.Dropdown(
                list(offer.drafters),
                value="auto",
                label="Drafter",
                info="or a checkpoint's hub id or folder" if offer.open else None,
                allow_custom_value=True,
            )
            self.temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature", info="0 is greedy")
            self.length = gr.Slider(1, MOST_TOKENS, 256, step=1, label="Longest answer", info="tokens")
            self.frames = gr.Slider(
                1, MOST_FRAMES, 8, step=1, label="Frames", info="taken evenly", visible=kind == "video"
            )

    def _showing(self) -> None:
        self.talk = gr.State(Talk(), time_to_live=_KEPT)
        with gr.Tabs() as self.tabs:
            with gr.Tab("Answer", id="answer"):
                self.answer = gr.HTML(
                    views.conversation_html([], "", None), elem_classes="mm-out mm-answer", apply_default_css=False
                )
            with gr.Tab("Side by side", id="race"):
                self.lanes = gr.HTML(views.race_html(None), elem_classes="mm-out mm-race", apply_default_css=False)
        with gr.Column(visible=False, elem_classes="mm-inside") as self.inside:
            gr.HTML(_LOOK, apply_default_css=False)
            self.step = gr.Slider(1, 2, 1, step=1, label="Pass", elem_classes="mm-step")
            self.tree = gr.HTML(elem_classes="mm-tree-view", apply_default_css=False)
            self.plots = gr.HTML(elem_classes="mm-plots-view", apply_default_css=False)

    def _connect(self) -> None:
        settings = [self.model, self.drafter, self.temperature, self.length, self.frames]
        media = [self.media] if self.media is not None else []
        inputs = [self.talk, self.prompt, *settings, *media]
        look = [self.inside, self.step, self.tree, self.plots]
        asked = gr.on(
            [self.ask.click, self.prompt.submit],
            self._ask,
            inputs,
            [self.talk, self.answer, self.tabs, *look],
            show_progress="minimal",
            show_progress_on=self.answer,
            **_TOGETHER,
        )
        raced = self.race.click(
            self._race,
            inputs,
            [self.talk, self.lanes, self.tabs, *look],
            show_progress="minimal",
            show_progress_on=self.lanes,
            **_TOGETHER,
        )
        self.stop.click(None, cancels=[asked, raced], api_visibility="private")
        cleared = [self.talk, self.answer, self.lanes, self.inside]
        self.clear.click(self._clear, None, cleared, cancels=[asked, raced], **_AT_ONCE)
        if self.media is not None:
            # On its own, cancelling happens at once; behind the clearing it would hit what is asked next.
            self.media.change(None, cancels=[asked, raced], api_visibility="private")
            self.media.change(self._clear, None, cleared, **_AT_ONCE)
        self.step.input(self._look, [self.talk, self.step], self.tree, trigger_mode="always_last", **_AT_ONCE)

    def _question(self, talk: Talk, prompt: str, settings: tuple[Any, ...]) -> Question:
        model, drafter, temperature, length, frames, *media = settings
        if not talk.seed:
            talk.seed = 1 + secrets.randbelow(2**31)
        return Question(
            kind=self.kind,
            prompt=prompt or "",
            upload=media[0] if media else None,
            earlier=talk.earlier,
            model=model or "",
            drafter=drafter or "",
            temperature=temperature,
            max_new_tokens=length,
            frames=frames,
            seed=talk.seed,
        )

    def _limits(self, question: Question) -> str:
        """What the model was trained on, where an embedded one is asked about something else than a sample."""
        told = plugins.limits(self.service.named(question).model)
        return "" if told is None or samples.provided(question, self.folder) else told

    def _ask(self, talk: Talk, prompt: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        here, rest = gr.Tabs(selected="answer"), (gr.skip(),) * 3
        run = None
        try:
            question = self._question(talk, prompt, settings)
            yield talk, views.conversation_html(talk.shown, prompt, None), here, gr.Column(visible=False), *rest
            limits = self._limits(question)
            for run in self.service.answer(question):
                if run.stats is None:
                    html = views.conversation_html(talk.shown, prompt, run, limits=limits)
                    yield talk, html, gr.skip(), gr.skip(), *rest
        except UserError as error:
            html = views.conversation_html(talk.shown, "", None, note=str(error))
            yield talk, html, here, gr.Column(visible=False), *rest
            return
        if run is None or run.stats is None:  # another request has taken over
            return
        html = views.conversation_html(talk.shown, prompt, run, limits=limits)
        talk = replace(talk, turns=[*talk.turns, (prompt, run.text.strip(), views.tokens_html(run.tokens))])
        talk.inside = inside_of(run)
        yield talk, html, gr.skip(), *_look_inside(talk.inside)

    def _race(self, talk: Talk, prompt: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        here, rest = gr.Tabs(selected="race"), (gr.skip(),) * 3
        race = None
        try:
            question = replace(self._question(talk, prompt, settings), earlier=[])
            yield talk, views.race_html(None), here, gr.Column(visible=False), *rest
            limits = self._limits(question)
            for race in self.service.race(question):
                if not race.finished:
                    yield talk, views.race_html(race, limits=limits), gr.skip(), gr.skip(), *rest
        except UserError as error:
            yield talk, views.race_html(None, str(error)), here, gr.Column(visible=False), *rest
            return
        if race is None or not race.finished:
            return
        talk = replace(talk, inside=inside_of(race.speculative))
        yield talk, views.race_html(race, limits=limits), gr.skip(), *_look_inside(talk.inside)

    @staticmethod
    def _look(talk: Talk, number: int) -> str:
        return step_html(talk.inside, number)

    @staticmethod
    def _clear() -> tuple[Any, ...]:
        return Talk(), views.conversation_html([], "", None), views.race_html(None), gr.Column(visible=False)


def _look_inside(inside: Inside | None) -> tuple[Any, Any, str, str]:
    """Column, slider, tree and plots."""
    if inside is None:
        return gr.Column(visible=False), gr.skip(), "", ""
    last, best = len(inside.steps), inside.best
    slider = gr.Slider(minimum=1, maximum=max(last, 2), value=best, visible=last > 1, label=f"Pass (1 to {last})")
    return gr.Column(visible=True), slider, step_html(inside, best), plots_html(inside)
