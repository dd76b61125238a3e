"""Answers token by token, with the time of every pass, and their recording as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any, Literal

from mmspec.answer import Piece
from mmspec.demos.chat_request import ChatRequest
from mmspec.demos.methods import drafter_of, label
from mmspec.drafters.registry import AUTO, PLAIN, registered_name
from mmspec.engine.stats import Stats
from mmspec.engine.stopping import FinishReason
from mmspec.engine.trace import TreeRecord
from mmspec.pipeline import Pipeline

Origin = Literal["first", "accepted", "bonus", "plain"]
_DIGITS = 4  # of recorded probabilities


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        text: the text that it adds; empty until a later token completes the character.
        origin: "first" (from the prefill), "accepted" (draft token), "bonus" (the target's token after them) or "plain"
            (decoded without draft tokens).
        step: the verify pass that emitted it, counted from 1; 0 is the prefill.
    """

    text: str
    origin: Origin
    step: int


@dataclass
class StreamedAnswer:
    """An answer that grows while it is generated.

    Attributes:
        drafter: the method of decoding, see ``resolved``.
        token_text: decodes token ids, special tokens included.
        seconds: time spent so far: image preprocessing, and the engine's steps. Time of the consumer does not count.
        limit: maximum number of tokens.
        steps: the verified draft trees so far.
        pass_ends: ``seconds`` at the end of the prefill and of every pass so far.
        ahead: number of requests before this one; None once it runs.
        stats, finish_reason: set when the answer is complete.
    """

    model: str
    drafter: str
    token_text: Callable[[list[int]], str] = field(default=str, repr=False)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    steps: list[TreeRecord] = field(default_factory=list)
    seconds: float = 0.0
    limit: int = 1
    pass_ends: list[float] = field(default_factory=list)
    ahead: int | None = None
    stats: Stats | None = None
    finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self.stats is not None

    @property
    def passes(self) -> int:
        """Number of passes after the prefill so far."""
        return max(len(self.pass_ends) - 1, 0)

    def append(self, piece: Piece, decode: Callable[[list[int]], str]) -> None:
        """Append a piece of the pipeline's stream; ``decode`` decodes token ids to text."""
        self.steps = piece.trees
        self.text += piece.text
        origins = self._token_origins(len(self.token_ids) + len(piece.token_ids))
        shown = "".join(token.text for token in self.tokens)
        for token_id in piece.token_ids:
            self.token_ids.append(token_id)
            text = decode(self.token_ids)
            whole = text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}")
            self.tokens.append(Token(text[len(shown) :] if whole else "", *origins[len(self.tokens)]))
            shown = text if whole else shown
        self.stats, self.finish_reason = piece.stats, piece.finish_reason
        self._time_passes(1 + self.tokens[-1].step if self.tokens else 0)

    def _time_passes(self, count: int) -> None:
        """Note the end of new passes; those of one piece have equal shares of its time."""
        start, new = self.pass_ends[-1] if self.pass_ends else 0.0, count - len(self.pass_ends)
        self.pass_ends += [start + (self.seconds - start) * number / new for number in range(1, new + 1)]

    def _token_origins(self, count: int) -> list[tuple[Origin, int]]:
        """Origin and step of at least the first ``count`` tokens; the steps may have emitted more after a stop."""
        if self.drafter == PLAIN:
            return [("plain", number) for number in range(count)]
        origins: list[tuple[Origin, int]] = [("first", 0)]
        for number, step in enumerate(self.steps, start=1):
            origins += [("accepted", number)] * (len(step.path) - 1)
            origins.append(("bonus" if len(step.tokens) > 1 else "plain", number))
        return origins


def resolved(method: str, pipe: Pipeline) -> str:
    """A method, with the registered name of the pipeline's drafter in place of ``auto``."""
    return method.replace(AUTO, registered_name(pipe.drafter) or PLAIN) if drafter_of(method) == AUTO else method


def stream_answer(
    pipe: Pipeline, method: str, request: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Iterator[StreamedAnswer]:
    """Answer a request; yields the same ``StreamedAnswer`` after every piece.

    Args:
        method: the pipeline's, see ``resolved``.
        request: ``prompt``, ``images``, ``videos``.
        keywords: as for ``Pipeline.generate``.
    """
    answer = StreamedAnswer(pipe.name, method, pipe.io.tokenizer.decode, limit=keywords["max_new_tokens"])
    start, preprocessing = clock(), None
    for piece in pipe.stream(**request, **keywords, trace=pipe.drafter is not None):
        if preprocessing is None:
            preprocessing = clock() - start - piece.seconds
        answer.seconds = preprocessing + piece.seconds
        answer.append(piece, pipe.io.decode)
        yield answer


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
