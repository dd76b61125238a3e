"""HTML of answers with coloured tokens, of statistics and of races."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from itertools import groupby

from demos.plots import format_duration
from demos.streaming import Race, StreamedAnswer, Token

_ORIGINS = {
    "first": ("", "first token, from the prefill"),
    "plain": ("", "decoded without draft tokens"),
    "accepted": ("mm-accepted", "drafted and accepted"),
    "bonus": ("mm-bonus", "bonus token, the model's own"),
}

LEGEND = (
    '<p class="mm-legend"><span class="mm-accepted">drafted and accepted</span> '
    '<span class="mm-bonus">bonus token of a pass</span> <span>undrafted</span></p>'
)


def tokens_html(tokens: Iterable[Token]) -> str:
    """Tokens coloured by origin; adjacent tokens of one step and origin share one element."""
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
        if not css_class:
            parts.append(escape(text))
            continue
        # Surrounding spaces stay outside of the element, which keeps adjacent elements apart.
        before, inner, after = re.fullmatch(r"(\s*)(.*?)(\s*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        title = f"pass {step}: {description}"
        mark = f'<span class="{css_class}" title="{title}">{escape(inner)}</span>' if inner else ""
        parts.append(f"{before}{mark}{after}")
    return "".join(parts)


def conversation_html(
    history: Iterable[tuple[str, str]], prompt: str, answer: StreamedAnswer | None, note: str = "", limits: str = ""
) -> str:
    """A conversation with the latest answer's statistics.

    Args:
        history: earlier (prompt, HTML of the answer) pairs.
        prompt: the latest prompt, or empty.
        answer: its answer so far; None before the first token.
        note: a message below, in plain text.
        limits: note on inputs that the model was not trained for, in plain text.
    """
    turns = [_turn_html(user, html) for user, html in history]
    if prompt:
        text = tokens_html(answer.tokens) if answer else ""
        turns.append(_turn_html(prompt, text or '<span class="mm-wait">…</span>'))
    hint = "The answer appears here. Take an example or bring your own, then press Ask."
    body = "".join(turns) or f'<p class="mm-empty">{hint}</p>'
    stats = stats_html(answer) if answer and answer.stats else ""
    legend = LEGEND if turns else ""
    return f'<div class="mm-talk">{body}</div>{legend}{_limits_html(limits)}{stats}{note_html(note)}'


def note_html(message: str) -> str:
    """A message to the visitor; empty if there is none."""
    return f'<p class="mm-note" role="alert">{escape(message)}</p>' if message else ""


def _limits_html(limits: str) -> str:
    return f'<p class="mm-limits">{escape(limits)}</p>' if limits else ""


def stats_html(answer: StreamedAnswer) -> str:
    """Statistics of a complete answer."""
    stats = answer.stats
    assert stats is not None
    passes = stats.num_spec_steps
    figures = [
        (f"{stats.tokens_per_second:.0f}" if passes else "-", "tokens per second"),
        (f"{stats.mean_acceptance_length:.1f}" if passes else "-", "tokens per pass"),
        (f"{stats.num_generated_tokens}", f"tokens in {passes + 1} passes"),
        (format_duration(stats.time_to_first_token), "to the first token"),
    ]
    cells = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in figures)
    end = "" if answer.finish_reason == "stop" else " · truncated at the length limit"
    source = f"{escape(answer.model)} · drafter {escape(answer.drafter)}{end}"
    return f'<div class="mm-figures">{cells}</div><p class="mm-made">{source}</p>'


def race_html(race: Race | None, note: str = "", limits: str = "") -> str:
    """Both answers of a race side by side, with the comparison once both are complete.

    ``note`` and ``limits`` are those of ``conversation_html``.
    """
    if race is None:
        hint = "Press Race: plain and speculative decoding answer the same prompt here, side by side."
        return f'<p class="mm-empty">{hint}</p>{note_html(note)}'
    longest = max(len(race.speculative.token_ids), len(race.plain.token_ids), 1)
    lanes = _lane("Speculative", race.speculative, longest) + _lane("Plain", race.plain, longest)
    state = "waiting until other requests have ended…" if race.waiting else "racing…"
    verdict = _verdict(race) if race.finished else f'<p class="mm-verdict">{state}</p>'
    return f'<div class="mm-lanes">{lanes}</div>{LEGEND}{_limits_html(limits)}{verdict}{_TIMING}{note_html(note)}'


_TIMING = (
    '<p class="mm-made">How the race is timed: same weights, same process, no other request meanwhile. Both methods '
    "run interleaved step by step, each on its own clock, and the one that has used less time takes the next step. "
    "One run each, after a short warm-up of both; plain decoding is this engine without a drafter.</p>"
)


def _lane(name: str, answer: StreamedAnswer, longest: int) -> str:
    count, stats = len(answer.token_ids), answer.stats
    speed = stats.tokens_per_second if stats else count / answer.seconds if answer.seconds else 0.0
    drafter = f"drafter {escape(answer.drafter)}" if answer.drafter != "none" else "one token per pass"
    unit = "tokens/s" if stats else "tokens/s so far"
    return (
        f'<section class="mm-lane" aria-label="{name}"><header><h3>{name}</h3><span>{drafter}</span></header>'
        f'<p class="mm-speed"><b>{speed:.0f}</b> {unit}<span>{count} tokens · {answer.seconds:.2f} s</span></p>'
        f'<div class="mm-bar"><i style="width:{100 * count / longest:.1f}%"></i></div>'
        f'<div class="mm-text">{tokens_html(answer.tokens)}</div></section>'
    )


def _verdict(race: Race) -> str:
    if race.decode_ratio is None:
        faster = "An answer of one token leaves no decoding to compare."
    else:
        faster = f"<b>{race.decode_ratio:.2f}x</b> the decoding speed, <b>{race.end_to_end_ratio:.2f}x</b> end to end."
    if race.equal:
        same = f"The {len(race.plain.token_ids)} tokens are equal."
    else:
        difference = race.difference
        assert difference is not None
        margin = "" if difference.margin is None else f" The logit margin there is {difference.margin:.2g}."
        same = f"The tokens differ first at position {difference.position}.{margin}"
    return f'<p class="mm-verdict">{faster} {same}</p>'


def _turn_html(prompt: str, answer: str) -> str:
    return f'<div class="mm-asked">{escape(prompt)}</div><div class="mm-text">{answer}</div>'
