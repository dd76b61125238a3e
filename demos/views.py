"""HTML of conversations, coloured tokens, races, and texts around the controls; ``templates/`` has the markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from mmspec import plugins
from mmspec.demos.catalog import Catalog, explained, label
from mmspec.demos.chat_request import Kind, Token, Turn
from mmspec.demos.racing import AS_FAST, RUNS, Race

_CHECKPOINTS: dict[Kind, str] = {
    "image": "llava-hf/llava-1.5-7b-hf",
    "video": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "text": "Qwen/Qwen2.5-1.5B-Instruct",
}
_LINKS = {"source": "Code", "documentation": "Docs"}  # labels on the page, by the label in the package's metadata
_PAPER = re.compile(r"arXiv (\d{4}\.\d{5})")
_ORIGINS = {"accepted": "drafted and accepted", "bonus": "bonus token, the model's own"}
_LEGEND = {
    "accepted": "drafted and accepted",
    "bonus": "bonus token: the model's own, after the accepted ones",
    "plain": "not drafted",
}


def format_duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def count(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def links_html() -> str:
    """The project's name, with links to code and docs from the package's metadata."""
    try:
        stated = metadata("mmspec").get_all("Project-URL") or []
    except PackageNotFoundError:
        stated = []
    pairs = (entry.partition(", ") for entry in stated)
    links = {url: _LINKS[name.lower()] for name, _, url in pairs if name.lower() in _LINKS}
    return _render("links", links={**links, "?view=api": "Use from Python"})


def methods_html(methods: Sequence[str]) -> str:
    """Description of each method, with a link to the paper."""
    link = r'<a href="https://arxiv.org/abs/\1" target="_blank" rel="noopener">\g<0></a>'
    lines = {name: Markup(_PAPER.sub(link, str(escape(text)))) for name, text in explained(methods).items()}
    return _render("methods", lines=lines)


def about_html(model: str, kind: Kind, catalog: Catalog) -> str:
    """An embedded model's training data, and how to use another model; empty for other models."""
    limits = plugins.limits(model)
    if limits is None:
        return ""
    others = [name for name in catalog.models_for(kind) if name != model and name in plugins.installed()]
    return _render("about", limits=limits.partition(";")[0], checkpoint=_CHECKPOINTS[kind], others=others)


def claim_html(race: Race | None = None) -> str:
    """The page's heading: the latest race's result in one line."""
    finished = race if race is not None and race.finished else None
    return _render("claim", race=finished, headline=headline(finished) if finished else "")


def headline(race: Race) -> str:
    """Result of a complete race in one line."""
    if not race.equal:
        difference = race.difference
        return f"The answers differ from token {1 + difference.position} on" if difference else "The answers differ"
    ratio, runs = race.speedup(race.fastest), race.runs
    speed = f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"
    if 1 / AS_FAST <= ratio <= AS_FAST:  # digits would be noise
        speed = "as fast"
    rests = f"median of {runs} runs" if runs > 1 else "one run"
    return f"The same {count(len(race.baseline.token_ids), 'token')}, {speed} ({rests})"


def tokens_html(tokens: Iterable[Token]) -> Markup:
    """Tokens coloured by origin; adjacent tokens of one pass and origin share one element, which names the pass."""
    parts = Markup("")
    for (step, origin), group in groupby(tokens, key=lambda token: (token.step, token.origin)):
        text = "".join(token.text for token in group)
        text = text if parts else text.lstrip()
        # Surrounding spaces stay outside of the element, which keeps adjacent elements apart.
        before, inner, after = re.fullmatch(r"(\s*)(.*?)(\s*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        about = _ORIGINS.get(origin)
        title = Markup(' class="mm-{}" title="pass {}: {}"').format(origin, step, about) if about else ""
        mark = Markup('<span{} data-pass="{}">{}</span>').format(title, step, inner) if inner else ""
        parts += Markup("{}{}{}").format(before, mark, after)
    return parts


def result_html(
    turns: Sequence[Turn] = (),
    prompt: str = "",
    race: Race | None = None,
    *,
    note: str = "",
    limits: str | None = None,
    stopped: bool = False,
    recorded: dict[str, Any] | None = None,
) -> str:
    """A conversation, with the latest answer or race in detail. Texts are plain.

    Args:
        race: lanes so far (a single answer has one lane); None before the first token.
        limits: note on inputs that the model was not trained for, or None.
    """
    lanes = race.lanes if race is not None and prompt and race.ahead is None else []
    # All answers may be complete while timing runs continue.
    timing = race is not None and race.finished and race.runs < RUNS and recorded is None
    view: dict[str, Any] = {"waiting": "Loading the model and reading the prompt…" if prompt else ""}
    if race is not None and race.ahead:
        view["waiting"] = f"Waiting: {count(race.ahead, 'request')} ahead of yours…"
    if race is not None and lanes:
        single, compared = len(lanes) == 1, race.finished and len(lanes) > 1 and not timing
        drafted = [lane for lane in lanes if lane.finished and lane.steps and (compared or single)]
        view = {
            "lanes": lanes,
            "heading": "Stopped" if stopped else _heading(race, timing),
            "origins": {"plain" if token.origin == "first" else token.origin for one in lanes for token in one.tokens},
            "compared": compared,
            "detailed": min(drafted, key=lambda lane: lane.seconds) if drafted else None,
            "waiting": "Stopped." if stopped else _spoken(race, timing),
        }
    data = json.dumps(recorded, ensure_ascii=False, separators=(",", ":")) if recorded and lanes else ""
    replayed = sorted(recorded["lanes"], key=lambda lane: lane["seconds"]) if recorded else []
    view |= {"drafted": [lane for lane in replayed if lane["trees"]], "limits": limits}
    view |= {"note": _sentence(note), "said": _sentence(note) or view["waiting"]}
    return _render("result", turns=turns, prompt=prompt, race=race, stopped=stopped, recording=data, **view)


def _sentence(message: str) -> str:
    """Capitalize a message and add a full stop; a file or parameter name at the start is kept as is."""
    first = message.partition(" ")[0]
    capital = first[:1].upper() + message[1:] if first.isalpha() else message
    return capital if capital.endswith((".", "!", "?")) or not capital else f"{capital}."


def _spoken(race: Race, timing: bool) -> str:
    """Text for screen readers."""
    first, single = race.lanes[0], len(race.lanes) == 1
    if single and first.finished:
        return first.text.strip()
    if race.finished and not single and not timing:
        return f"{headline(race)}. {first.text.strip()}"
    return "Answering…" if single else "Racing…"


def _heading(race: Race, timing: bool) -> str:
    if len(race.lanes) == 1:
        return "Answer" if race.lanes[0].finished else "Answering…"
    if not race.finished:
        return "Racing…"
    order = sorted(race.lanes, key=lambda lane: lane.seconds)
    times = " · ".join(f"{label(lane.drafter)} {format_duration(lane.seconds)}" for lane in order)
    if not race.equal:
        margin = race.difference.margin if race.difference else None
        return times if margin is None else f"{times}; the logit margin at the difference is {margin:.2g}"
    return f"{times}: equal tokens" + (f"; timing {RUNS - race.runs} more runs…" if timing else "")


_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True)
_TEMPLATES.globals.update(label=label, count=count, tokens_html=tokens_html, legend=_LEGEND, most_runs=RUNS)
_TEMPLATES.filters.update(duration=format_duration)


def _render(name: str, **values: Any) -> str:
    return _TEMPLATES.get_template(f"{name}.html").render(**values)
