"""Recorded answers as JSON: what the page's replay shows, and what visitors save as a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspec.demos.chat_request import ChatRequest
from mmspec.demos.methods import label
from mmspec.demos.streaming import StreamedAnswer
from mmspec.engine.trace import TreeRecord

_DIGITS = 4


def recording(lanes: Sequence[StreamedAnswer], chat: ChatRequest, example: str | None) -> dict[str, Any]:
    """Answers of one request, without references to the model.

    Args:
        lanes: an answer per method, complete or stopped.
        example: name of the example that was uploaded, if any.

    Returns:
        ``settings``: what a link to the page contains. ``lanes``: of each method the text, the ``ends`` of its prefill
        and passes in seconds, the ``emitted`` tokens of each, ``shares`` of drafting and verification in a pass, the
        verified ``trees``, and the ``texts`` of their tokens by id.
    """
    settings = {
        "kind": chat.kind,
        "prompt": chat.prompt,
        "model": chat.model,
        "methods": [lane.drafter for lane in lanes],
        "temperature": chat.temperature,
        "max_new_tokens": chat.max_new_tokens,
        "seed": chat.seed,
        **({"frames": chat.frames} if chat.kind == "video" else {}),
        **({"example": example} if example else {}),
    }
    return {"settings": settings, "lanes": [_lane(lane) for lane in lanes]}


def _lane(lane: StreamedAnswer) -> dict[str, Any]:
    emitted = [0] * len(lane.pass_ends)
    for token in lane.tokens:
        emitted[token.step] += 1
    seen = {token for step in lane.steps for token in (*step.tokens, step.bonus)}
    return {
        "method": lane.drafter,
        "label": label(lane.drafter),
        "text": lane.text.strip(),
        "seconds": round(lane.seconds, 6),
        "ends": [round(end, 6) for end in lane.pass_ends],
        "emitted": emitted,
        "shares": _shares(lane),
        "trees": [_tree(step) for step in lane.steps],
        "texts": {token: lane.token_text([token]) for token in sorted(seen)},
    }


def _shares(lane: StreamedAnswer) -> list[float]:
    """Shares of drafting and verification in the time of the passes; equal ones of an answer that was stopped."""
    stats = lane.stats
    total = stats.draft_seconds + stats.verify_seconds + stats.commit_seconds if stats else 0.0
    if stats is None or not total:
        return [0.5, 0.5]
    return [round(stats.draft_seconds / total, 2), round(stats.verify_seconds / total, 2)]


def _tree(step: TreeRecord) -> dict[str, Any]:
    return {
        "tokens": step.tokens,
        "parents": step.parents,
        "path": step.path,
        "bonus": step.bonus,
        "probs": [round(prob, _DIGITS) for prob in step.probs],
        "bonus_prob": round(step.bonus_prob, _DIGITS),
        "guesses": step.guesses and [round(guess, _DIGITS) for guess in step.guesses],
    }
