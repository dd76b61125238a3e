"""HTML of conversations, coloured tokens, races, and texts around the controls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, metadata
from itertools import groupby
from typing import Any

from mmspec import plugins
from mmspec.demos.catalog import Catalog, explained, label
from mmspec.demos.chat_request import Kind, Token, Turn
from mmspec.demos.racing import AS_FAST, RUNS, Race, StreamedAnswer
from mmspec.drafters.registry import PLAIN
from mmspec.engine.stats import Stats

_WIDTH, _HEIGHT = 360, 168
_LEFT, _BASE = 34, 128
_PHASES = {"prefill": "read prompt", "draft": "guess", "verify": "check", "commit": "store"}


def format_duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def histogram(counts: Sequence[int]) -> str:
    """Histogram of accepted draft tokens: ``counts[k]`` verify passes accepted k."""
    most = max(counts, default=0)
    if not most:
        return ""
    wide = (_WIDTH - _LEFT - 8) / len(counts)
    bar = min(wide * 0.7, 36)
    parts = []
    for accepted, count in enumerate(counts):
        x = _LEFT + (accepted + 0.5) * wide
        tall = 84 * count / most
        tooltip = f"{count} {'pass' if count == 1 else 'passes'} accepted {accepted}"
        parts.append(
            f'<g><title>{tooltip}</title><rect class="bar" x="{x - bar / 2:.1f}" y="{_BASE - tall:.1f}" '
            f'width="{bar:.1f}" height="{tall:.1f}" rx="2"/></g>'
        )
        if count:
            parts.append(f'<text class="value" x="{x:.1f}" y="{_BASE - tall - 5:.1f}">{count}</text>')
        if wide > 16 or accepted % 2 == 0:
            parts.append(f'<text class="tick" x="{x:.1f}" y="{_BASE + 16}">{accepted}</text>')
    axis = f'<line x1="{_LEFT - 8}" x2="{_WIDTH}" y1="{_BASE + 0.5}" y2="{_BASE + 0.5}"/>'
    label = f'<text class="tick" x="{(_WIDTH + _LEFT) / 2}" y="{_BASE + 36}">draft tokens accepted in a pass</text>'
    return _figure("Passes by accepted draft tokens", axis + "".join(parts) + label)


def time_split(stats: Stats) -> str:
    """Bar chart of the time of prefill, drafting, verification and commit."""
    times = {
        "prefill": stats.prefill_seconds,
        "draft": stats.draft_seconds,
        "verify": stats.verify_seconds,
        "commit": stats.commit_seconds,
    }
    total = sum(times.values())
    if not total:
        return ""
    parts = []
    longest = max(times.values())
    for row, (name, seconds) in enumerate(times.items()):
        y = 30 + row * 30
        wide = max(150 * seconds / longest, 1.5)
        label = f"{format_duration(seconds)} · {seconds / total:.0%}"
        parts.append(
            f'<text class="name" x="0" y="{y + 13}">{_PHASES[name]}</text>'
            f'<rect class="{name}" x="84" y="{y}" width="{wide:.1f}" height="18" rx="2"/>'
            f'<text class="label" x="{84 + wide + 8:.1f}" y="{y + 13}">{label}</text>'
        )
    return _figure(f"Time: {format_duration(total)}", "".join(parts))


def _figure(title: str, body: str) -> str:
    return (
        f'<svg class="mm-plot" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-label="{title}">'
        f'<text class="title" x="0" y="14">{title}</text>{body}</svg>'
    )


_CHECKPOINTS: dict[Kind, str] = {
    "image": "llava-hf/llava-1.5-7b-hf",
    "video": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "text": "Qwen/Qwen2.5-1.5B-Instruct",
}

_LINKS = {
    "source": "Code",
    "documentation": "Docs",
}  # labels on the page, by the label of the URL in the package's metadata
_PAPER = re.compile(r"arXiv (\d{4}\.\d{5})")


def links_html() -> str:
    """The project's name, with links to code and docs from the package's metadata."""
    try:
        stated = metadata("mmspec").get_all("Project-URL") or []
    except PackageNotFoundError:
        stated = []
    pairs = (entry.partition(", ") for entry in stated)
    named = [(_LINKS.get(name.lower()), url) for name, _, url in pairs]
    links = "".join(f' <a href="{escape(url)}">{name}</a>' for name, url in named if name)
    return f'<p class="mm-name"><b>mmspec</b>{links} <a href="?view=api">Use from Python</a></p>'


def methods_html(methods: Sequence[str]) -> str:
    """Description of each method, with a link to the paper."""
    link = r'<a href="https://arxiv.org/abs/\1" target="_blank" rel="noopener">\g<0></a>'
    pairs = ((name, _PAPER.sub(link, escape(text))) for name, text in explained(methods).items())
    lines = "".join(f"<li><b>{escape(name)}</b>: {text}.</li>" for name, text in pairs)
    return f'<h2 class="mm-part">The methods</h2><ul class="mm-explained">{lines}</ul>'


def about_html(model: str, kind: Kind, catalog: Catalog) -> str:
    """An embedded model's training data, and how to use another model; empty for other models."""
    limits = plugins.limits(model)
    if limits is None:
        return ""
    others = [name for name in catalog.models_for(kind) if name != model and name in plugins.installed()]
    select = f" Also installed, see Settings: {', '.join(map(escape, others))}." if others else ""
    start = f"For those, start <code>mmspec demo --model {_CHECKPOINTS[kind]}</code>."
    return f'<p class="mm-about">{escape(limits.partition(";")[0])}. {start}{select}</p>'


_ORIGINS = {
    "first": ("", "first token, from the prefill"),
    "plain": ("", "decoded without draft tokens"),
    "accepted": ("mm-accepted", "drafted and accepted"),
    "bonus": ("mm-bonus", "bonus token, the model's own"),
}

_LEGEND = {
    "accepted": "drafted and accepted",
    "bonus": "bonus token: the model's own, after the accepted ones",
    "plain": "not drafted",
}

_EMPTY = "Select an example or bring your own. Race answers the prompt with each selected method, Ask with one method."
_TIMING = (
    "How the race is timed: same weights, same process, no other request meanwhile. After a short warm-up, the methods "
    f"take turns, each alone, up to {RUNS} times; shown is each method's run of median time. Plain decoding is this "
    "engine without a drafter."
)

_EXPLANATION = (
    "A token is a word or a piece of one. A small drafter guesses several tokens ahead, and the model checks them all "
    "in one pass. What you read is what the model alone would have written."
)


def claim_html(race: Race | None = None) -> str:
    """The page's heading: the latest race's result in one line."""
    heading, compared = "The model's own answer, sooner", ""
    if race is not None and race.finished:
        heading = headline(race)
        fast, slow = race.fastest, race.baseline
        compared = f"<b>{escape(label(fast.drafter))}</b> against {_method(slow)} decoding of {escape(fast.model)}. "
    return (
        f'<h1>{heading}</h1><p>{compared}{_EXPLANATION}</p><button type="button" class="mm-jump">Try your own</button>'
    )


def headline(race: Race) -> str:
    """Result of a complete race in one line."""
    if not race.equal:
        difference = race.difference
        return f"The answers differ from token {1 + difference.position} on" if difference else "The answers differ"
    count, runs = len(race.baseline.token_ids), race.runs
    rests = f"median of {runs} runs" if runs > 1 else "one run"
    return f"The same {count} token{'' if count == 1 else 's'}, {_faster(race.speedup(race.fastest))} ({rests})"


def _faster(ratio: float) -> str:
    """A speedup in words; ratios within ``AS_FAST`` get no digits, as they are noise."""
    if 1 / AS_FAST <= ratio <= AS_FAST:
        return "as fast"
    return f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"


def tokens_html(tokens: Iterable[Token]) -> str:
    """Tokens coloured by origin; adjacent tokens of one pass and origin share one element, which names the pass."""
    parts = []
    text_started = False
    for (step, origin), group in groupby(tokens, key=lambda token: (token.step, token.origin)):
        text = "".join(token.text for token in group)
        if not text_started:
            text = text.lstrip()
            text_started = bool(text)
        if not text:
            continue
        css_class, description = _ORIGINS[origin]
        # Surrounding spaces stay outside of the element, which keeps adjacent elements apart.
        before, inner, after = re.fullmatch(r"(\s*)(.*?)(\s*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        title = f' class="{css_class}" title="pass {step}: {description}"' if css_class else ""
        mark = f'<span{title} data-pass="{step}">{escape(inner)}</span>' if inner else ""
        parts.append(f"{before}{mark}{after}")
    return "".join(parts)


def result_html(
    history: Iterable[tuple[str, str]],
    prompt: str = "",
    race: Race | None = None,
    *,
    ahead: int | None = None,
    note: str = "",
    limits: str = "",
    stopped: bool = False,
    recorded: dict[str, Any] | None = None,
) -> str:
    """A conversation, with the latest answer or race in detail.

    Args:
        history: earlier (prompt, HTML of the answer) pairs.
        prompt: the latest prompt, or empty.
        race: lanes so far (a single answer has one lane); None before the first token.
        ahead: number of requests ahead in the queue.
        note: a message below, in plain text.
        limits: note on inputs that the model was not trained for, in plain text.
        stopped: whether the visitor stopped the request.
        recorded: recording for the replay.
    """
    turns = "".join(f"{_asked(user)}<div class='mm-text'>{answer}</div>" for user, answer in history)
    if prompt:
        turns += _asked(prompt)
    elif not turns:
        turns = f'<p class="mm-empty">{_EMPTY}</p>'
    spoken, latest = "", ""
    if prompt and race is not None and race.lanes:
        latest = _lanes_html(race, stopped, recorded)
        spoken = "Racing…" if _timing(race, recorded) else _spoken(race, stopped)
    elif prompt and not note:
        spoken = _waiting(ahead)
        latest = f'<p class="mm-wait">{spoken}</p>'
    extra = f'<p class="mm-limits">{escape(limits)}</p>' if limits else ""
    say = f'<p class="mm-say" hidden>{escape(note or spoken)}</p>'
    return f'<div class="mm-talk">{turns}</div>{latest}{extra}{note_html(note)}{say}'


def stopped_html(text: str) -> str:
    return f'{text} <span class="mm-mark">stopped</span>'


def turns_html(turns: Iterable[Turn]) -> list[tuple[str, str]]:
    """Prompt and HTML of the answer of each turn."""
    texts = [(turn, tokens_html(turn.tokens)) for turn in turns]
    return [(turn.prompt, stopped_html(text) if turn.stopped else text) for turn, text in texts]


def note_html(message: str) -> str:
    """A message to the visitor; empty for an empty message."""
    return f'<p class="mm-note" role="alert">{escape(_sentence(message))}</p>' if message else ""


def _sentence(message: str) -> str:
    """Capitalize a message and add a full stop; a file or parameter name at the start is kept as is."""
    first = message.partition(" ")[0]
    capital = first[:1].upper() + message[1:] if first.isalpha() else message
    return capital if capital.endswith((".", "!", "?")) else f"{capital}."


def _asked(prompt: str) -> str:
    return f'<div class="mm-asked">{escape(prompt)}</div>'


def _waiting(ahead: int | None) -> str:
    if not ahead:
        return "Loading the model and reading the prompt…"
    return f"Waiting: {ahead} request{'' if ahead == 1 else 's'} ahead of yours…"


def _spoken(race: Race, stopped: bool) -> str:
    """Text for screen readers."""
    if stopped:
        return "Stopped."
    if race.finished and len(race.lanes) > 1:
        return f"{headline(race)}. {race.lanes[0].text.strip()}"
    if len(race.lanes) == 1 and race.lanes[0].finished:
        return race.lanes[0].text.strip()
    return "Racing…" if len(race.lanes) > 1 else "Answering…"


def _lanes_html(race: Race, stopped: bool, recorded: dict[str, Any] | None) -> str:
    lanes = race.lanes
    timing = _timing(race, recorded)
    figures = race.finished and len(lanes) > 1 and not timing
    parts = [
        f"<h2>{_heading(race, stopped, timing)}</h2>",
        '<div class="mm-player"></div>' if recorded else "",
        f'<div class="mm-lanes" data-lanes="{len(lanes)}">{"".join(_lane(lane, stopped) for lane in lanes)}</div>',
        _legend(lanes),
        '<div class="mm-tree-view"></div>' if recorded else "",
        _table(race) if figures else "",
    ]
    if figures or (len(lanes) == 1 and lanes[0].finished):
        drafted = [lane for lane in lanes if lane.stats is not None and lane.steps]
        fastest = min(drafted, key=lambda lane: lane.seconds, default=None)
        parts.append(_plots(fastest) if fastest else "")
    if figures:
        parts.append(f'<p class="mm-made">{_TIMING} Complete runs: {race.runs}.</p>')
    if recorded:
        data = escape(json.dumps(recorded, ensure_ascii=False, separators=(",", ":")))
        parts.append(f'<div class="mm-share" data-recording="{data}"></div>')
    return f'<section class="mm-result">{"".join(parts)}</section>'


def _timing(race: Race, recorded: dict[str, Any] | None) -> bool:
    """Whether all answers of a race are complete but timing runs continue."""
    return race.finished and race.runs < RUNS and recorded is None


def _heading(race: Race, stopped: bool, timing: bool) -> str:
    if stopped:
        return "Stopped"
    if len(race.lanes) == 1:
        return "Answer" if race.lanes[0].finished else "Answering…"
    if not race.finished:
        return "Racing…"
    order = sorted(race.lanes, key=lambda lane: lane.seconds)
    times = " · ".join(f"{escape(label(lane.drafter))} {format_duration(lane.seconds)}" for lane in order)
    if not race.equal:
        margin = race.difference.margin if race.difference else None
        return f"{times}" + ("" if margin is None else f"; the logit margin at the difference is {margin:.2g}")
    return f"{times}: equal tokens" + (f"; timing {RUNS - race.runs} more runs…" if timing else "")


def _method(lane: StreamedAnswer) -> str:
    return "plain" if lane.drafter == PLAIN else escape(label(lane.drafter))


def _lane(lane: StreamedAnswer, stopped: bool) -> str:
    count, stats = len(lane.token_ids), lane.stats
    speed = stats.tokens_per_second if stats else count / lane.seconds if lane.seconds else 0.0
    kind = f"{count / (lane.passes + 1):.1f} tokens per pass" if lane.drafter != PLAIN else "one token per pass"
    unit = "tokens/s" if stats else "tokens/s so far"
    passes = f"{count} token{'' if count == 1 else 's'} in {lane.passes} pass{'' if lane.passes == 1 else 'es'}"
    if stats and lane.drafter != PLAIN:
        kind = f"{stats.mean_acceptance_length:.1f} tokens per pass"
    end = "; the answer reached the length limit" if lane.finish_reason == "length" else ""
    text = tokens_html(lane.tokens)
    name, css_class = escape(label(lane.drafter)), "mm-lane mm-slow" if lane.drafter == PLAIN else "mm-lane"
    return (
        f'<section class="{css_class}" aria-label="{name}"><header><h3>{name}</h3><span>{kind}</span></header>'
        f'<p class="mm-speed"><b>{speed:.0f}</b> {unit}</p><p class="mm-count">{passes} · {lane.seconds:.2f} s</p>'
        f'<div class="mm-bar"><i style="width:{100 if lane.finished else 100 * count / lane.limit:.1f}%"></i></div>'
        f'<div class="mm-text">{stopped_html(text) if stopped else text}</div>'
        f'<p class="mm-made">{escape(lane.model)}{end}</p></section>'
    )


def _legend(lanes: Sequence[StreamedAnswer]) -> str:
    origins = {"plain" if token.origin == "first" else token.origin for lane in lanes for token in lane.tokens}
    if not origins - {"plain"}:
        return ""
    spans = "".join(f'<span class="mm-{origin}">{_LEGEND[origin]}</span>' for origin in _LEGEND if origin in origins)
    return f'<p class="mm-legend">{spans}</p>'


def _table(race: Race) -> str:
    """Table of the race's statistics, with a row per lane."""
    names = (
        "method",
        "tokens",
        "passes",
        "tokens per pass",
        "tokens/s",
        "first token",
        "total",
        "decoding speedup",
        "total speedup",
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = []
    for lane in race.lanes:
        stats = lane.stats
        assert stats is not None
        decoding = race.decode_speedup(lane)
        cells = (
            len(lane.token_ids),
            lane.passes,
            f"{stats.mean_acceptance_length:.1f}",
            f"{stats.tokens_per_second:.0f}",
            format_duration(stats.time_to_first_token),
            format_duration(lane.seconds),
            "-" if decoding is None else f"{decoding:.2f}x",
            f"{race.speedup(lane):.2f}x",
        )
        name = f'<th scope="row">{escape(label(lane.drafter))}</th>'
        rows.append(f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        '<div class="mm-wide" tabindex="0" role="region" aria-label="The race in figures">'
        '<table class="mm-table mm-race">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _plots(lane: StreamedAnswer) -> str:
    assert lane.stats is not None
    plots = histogram(lane.stats.acceptance_histogram) + time_split(lane.stats)
    return f'<h3 class="mm-part">{escape(label(lane.drafter))} in detail</h3><div class="mm-plots">{plots}</div>'
