"""Stream answers token by token, with the time of every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any, Literal

from mmspec.answer import Piece
from mmspec.demos.methods import drafter_of
from mmspec.demos.models import label
from mmspec.drafters.registry import AUTO, PLAIN
from mmspec.engine.stats import Stats
from mmspec.engine.stopping import FinishReason
from mmspec.engine.trace import TreeRecord
from mmspec.pipeline import Pipeline

Origin = Literal["first", "accepted", "bonus", "plain"]


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
    return method.replace(AUTO, label(pipe)) if drafter_of(method) == AUTO else method


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
