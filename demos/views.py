"""What the page shows, as HTML: answers with coloured tokens, figures, the race."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from itertools import groupby

from demos.plots import duration
from demos.runs import Race, Run, Token

_ORIGINS = {
    "first": ("", "first token, from the prompt's own pass"),
    "plain": ("", "decoded without drafts"),
    "accepted": ("mm-accepted", "drafted and accepted"),
    "bonus": ("mm-bonus", "bonus token, the model's own"),
}

LEGEND = (
    '<p class="mm-legend"><span class="mm-accepted">drafted and accepted</span> '
    '<span class="mm-bonus">bonus token of a pass</span> <span>undrafted</span></p>'
)


def tokens_html(tokens: Iterable[Token]) -> str:
    """Tokens coloured by where they came from; neighbours of one step and origin stand in one mark."""
    parts = []
    text_started = False
    for (step, origin), group in groupby(tokens, key=lambda token: (token.step, token.origin)):
        text = "".join(token.text for token in group)
        if not text_started:
            text = text.lstrip()
            text_started = bool(text)
        if not text:
            continue
        kind, told = _ORIGINS[origin]
        if not kind:
            parts.append(escape(text))
            continue
        # Spaces around a mark stay outside of it, which keeps the marks of neighbours apart.
        before, inner, after = re.fullmatch(r"(\s*)(.*?)(\s*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        mark = f'<span class="{kind}" title="pass {step}: {told}">{escape(inner)}</span>' if inner else ""
        parts.append(f"{before}{mark}{after}")
    return "".join(parts)


def conversation_html(
    earlier: Iterable[tuple[str, str]], question: str, run: Run | None, note: str = "", limits: str = ""
) -> str:
    """A conversation.

    Args:
        earlier: questions and the HTML of their answers.
        question: the latest one; empty for none.
        run: its answer so far; None before its first token.
        note: what else is to be told below, in plain text.
        limits: what the model was not trained for, where that concerns the answer, in plain text.
    """
    turns = [_turn(asked, answered) for asked, answered in earlier]
    if question:
        turns.append(_turn(question, tokens_html(run.tokens) if run else '<span class="mm-wait">…</span>'))
    hint = "The answer appears here. Take an example or bring your own, then press Ask."
    body = "".join(turns) or f'<p class="mm-empty">{hint}</p>'
    figures = figures_html(run) if run and run.stats else ""
    legend = LEGEND if turns else ""
    return f'<div class="mm-talk">{body}</div>{legend}{_limits_html(limits)}{figures}{note_html(note)}'


def note_html(message: str) -> str:
    """A message to the visitor; nothing where there is none."""
    return f'<p class="mm-note" role="alert">{escape(message)}</p>' if message else ""


def _limits_html(limits: str) -> str:
    return f'<p class="mm-limits">{escape(limits)}</p>' if limits else ""


def figures_html(run: Run) -> str:
    """The figures of an answer that has ended."""
    stats = run.stats
    assert stats is not None
    passes = stats.num_spec_steps
    figures = [
        (f"{stats.tokens_per_second:.0f}" if passes else "-", "tokens per second"),
        (f"{stats.mean_acceptance_length:.1f}" if passes else "-", "tokens per pass"),
        (f"{stats.num_generated_tokens}", f"tokens in {passes + 1} passes"),
        (duration(stats.time_to_first_token), "to the first token"),
    ]
    cells = "".join(f"<div><b>{value}</b><span>{told}</span></div>" for value, told in figures)
    end = "" if run.finish_reason == "stop" else " · cut at the length limit"
    made = f"{escape(run.model)} · drafter {escape(run.drafter)}{end}"
    return f'<div class="mm-figures">{cells}</div><p class="mm-made">{made}</p>'


def race_html(race: Race | None, note: str = "", limits: str = "") -> str:
    """Two lanes, and the verdict when both have arrived; ``note`` and ``limits`` as in ``conversation_html``."""
    if race is None:
        hint = "Press Race: plain and speculative decoding answer the same prompt here, side by side."
        return f'<p class="mm-empty">{hint}</p>{note_html(note)}'
    most = max(len(race.speculative.token_ids), len(race.plain.token_ids), 1)
    lanes = _lane("Speculative", race.speculative, most) + _lane("Plain", race.plain, most)
    verdict = _verdict(race) if race.finished else '<p class="mm-verdict">racing…</p>'
    return f'<div class="mm-lanes">{lanes}</div>{LEGEND}{_limits_html(limits)}{verdict}{_FAIR}{note_html(note)}'


_FAIR = (
    '<p class="mm-made">How it is kept fair: same weights, same process, no other request beside it. The two take '
    "turns step by step, each on its own clock, and whoever has used less time goes next, so neither slows the other. "
    "One run each, after a short warm-up of both; plain decoding is this engine without a drafter.</p>"
)


def _lane(name: str, run: Run, most: int) -> str:
    count = len(run.token_ids)
    speed = run.stats.tokens_per_second if run.stats else count / run.seconds if run.seconds else 0.0
    drafter = f"drafter {escape(run.drafter)}" if run.drafter != "none" else "one token per pass"
    told = "tokens/s" if run.stats else "tokens/s so far"
    return (
        f'<section class="mm-lane" aria-label="{name}"><header><h3>{name}</h3><span>{drafter}</span></header>'
        f'<p class="mm-speed"><b>{speed:.0f}</b> {told}<span>{count} tokens · {run.seconds:.2f} s</span></p>'
        f'<div class="mm-bar"><i style="width:{100 * count / most:.1f}%"></i></div>'
        f'<div class="mm-text">{tokens_html(run.tokens)}</div></section>'
    )


def _verdict(race: Race) -> str:
    if race.decode_ratio is None:
        faster = "An answer of one token leaves no decoding to compare."
    else:
        faster = f"<b>{race.decode_ratio:.2f}x</b> the decoding speed, <b>{race.end_to_end_ratio:.2f}x</b> end to end."
    if race.equal:
        same = f"The {len(race.plain.token_ids)} tokens are equal."
    else:
        found = race.difference
        assert found is not None
        margin = "" if found.margin is None else f" The model's logits are {found.margin:.2g} apart there."
        same = f"The tokens differ first at position {found.position}.{margin}"
    return f'<p class="mm-verdict">{faster} {same}</p>'


def _turn(question: str, answer: str) -> str:
    return f'<div class="mm-asked">{escape(question)}</div><div class="mm-text">{answer}</div>'
