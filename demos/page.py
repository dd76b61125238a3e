"""The demo's page: tabs for images, videos and texts with the same controls and outputs, and links that set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from mmspec.demos import endpoints, notes, views
from mmspec.demos.chat_request import MAX_PROMPT_CHARS, ChatRequest, Kind
from mmspec.demos.methods import FEWEST, MOST
from mmspec.demos.service import Service
from mmspec.demos.tab import UNQUEUED, Tab
from mmspec.errors import UserError


@dataclass(frozen=True)
class LinkSettings:
    """Settings of a link.

    Attributes:
        chat: the request, without its upload.
        methods: what answered it, one method or several.
        example: name of the example's file, or empty.
    """

    chat: ChatRequest
    methods: tuple[str, ...]
    example: str


def parse_link(query: Mapping[str, str]) -> LinkSettings | None:
    """Settings of a query; None if it has none. Other parameters are ignored.

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
    methods = tuple(name for name in query.get("methods", "").split(",") if name)[:MOST]
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
        gr.HTML(notes.links_html(), apply_default_css=False)
        with gr.Tabs() as selected:
            tabs: dict[str, Tab] = {kind: Tab(service, kind, folder) for kind in kinds}
        link = _Link(tabs, selected)
        page.load(link.settings, None, link.fields, **UNQUEUED)
        endpoints.add_endpoints(page, service)
    page.queue(max_size=None, default_concurrency_limit=None)
    return page, tabs[kinds[0]]


@dataclass
class _Link:
    """What a visitor with a link sees first: its settings."""

    tabs: dict[str, Tab]
    selected: gr.Tabs

    @property
    def fields(self) -> list[Any]:
        """What a link may set."""
        shown: list[Any] = [self.selected]
        for tab in self.tabs.values():
            controls = tab.controls
            shown += [controls.result, controls.prompt, controls.methods, *controls.settings, *controls.media]
        return shown

    def settings(self, request: gr.Request) -> Any:
        """Updates of the components that a link sets; its visitors get no opening races."""
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
