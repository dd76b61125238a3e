"""The demo's page: tabs for images, videos and texts with the same controls and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from mmspec.demos import endpoints, views
from mmspec.demos.chat_request import Kind
from mmspec.demos.link import LinkSettings, parse_link
from mmspec.demos.methods import FEWEST
from mmspec.demos.service import Service
from mmspec.demos.tab import QUEUED, UNQUEUED, Tab
from mmspec.errors import UserError


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
        tabs: dict[str, Tab] = {}
        with gr.Tabs() as selected:
            for kind in kinds:
                with gr.Tab(kind.capitalize(), id=kind):
                    tabs[kind] = Tab(service, kind, folder, claim, opened=not tabs)
        opening = _Opening(tabs, selected)
        page.load(opening.settings, None, opening.fields, **UNQUEUED).then(
            opening.race, None, [*opening.outputs], **QUEUED
        )
        endpoints.add_endpoints(page, service)
    page.queue(max_size=None, default_concurrency_limit=None)
    return page


@dataclass
class _Opening:
    """What a visitor sees first: the first tab with its example raced, or the settings of a link."""

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
