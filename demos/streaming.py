"""Stream answers token by token, and run speculative against plain decoding interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any, Literal

from demos.models import LoadedModel, label
from mmspec.compare import Difference, first_difference
from mmspec.engine.stats import Stats
from mmspec.engine.stopping import FinishReason
from mmspec.pipeline import Piece, Pipeline
from mmspec.speculation.trace import JudgedTree

Origin = Literal["first", "accepted", "bonus", "plain"]

_WARM_UP = 8  # tokens


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
        drafter: its registered name, or "none".
        token_text: decodes token ids, special tokens included.
        seconds: time spent so far, image preprocessing included.
        steps: the verified draft trees so far.
        stats, finish_reason: set when the answer is complete.
    """

    model: str
    drafter: str
    token_text: Callable[[list[int]], str] = field(default=str, repr=False)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    steps: list[JudgedTree] = field(default_factory=list)
    seconds: float = 0.0
    stats: Stats | None = None
    finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self.stats is not None

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

    def _token_origins(self, count: int) -> list[tuple[Origin, int]]:
        """Origin and step of at least the first ``count`` tokens; the steps may have emitted more after a stop."""
        if self.drafter == "none":
            return [("plain", number) for number in range(count)]
        found: list[tuple[Origin, int]] = [("first", 0)]
        for number, step in enumerate(self.steps, start=1):
            found += [("accepted", number)] * (len(step.path) - 1)
            found.append(("bonus" if len(step.tokens) > 1 else "plain", number))
        return found


def stream_answer(pipe: Pipeline, request: Mapping[str, Any], keywords: Mapping[str, Any]) -> Iterator[StreamedAnswer]:
    """Answer a request; yields the same ``StreamedAnswer`` after every piece.

    Args:
        request: ``prompt``, ``images``, ``videos``.
        keywords: as for ``Pipeline.generate``.
    """
    answer = StreamedAnswer(pipe.name, label(pipe), pipe.io.tokenizer.decode)
    pieces = pipe.stream(**request, **keywords, trace=pipe.drafter is not None)
    while True:
        start = clock()
        piece = next(pieces, None)
        answer.seconds += clock() - start
        if piece is None:
            return
        answer.append(piece, pipe.io.decode)
        yield answer


@dataclass
class Race:
    """Speculative and plain decoding of one request. The comparison is set when both answers are complete.

    Attributes:
        decode_ratio: speedup of the decode phase; None for answers of one token.
        end_to_end_ratio: speedup of the whole request, image preprocessing and prefill included.
        equal: whether the tokens are equal.
        difference: the first difference, if any.
        waiting: whether other requests have to end first.
    """

    speculative: StreamedAnswer
    plain: StreamedAnswer
    decode_ratio: float | None = None
    end_to_end_ratio: float | None = None
    equal: bool | None = None
    difference: Difference | None = None
    waiting: bool = False

    @property
    def finished(self) -> bool:
        return self.equal is not None


def race(loaded: LoadedModel, drafter: str, request: Mapping[str, Any], keywords: Mapping[str, Any]) -> Iterator[Race]:
    """Answer a request with speculative and plain decoding, interleaved step by step and timed separately.

    The method that has used less time so far takes the next step, so that both run under the same conditions and
    neither slows the other down; nothing else may decode meanwhile. Both are warmed up first.
    """
    speculative, plain = loaded.pipeline(drafter), loaded.open("none")
    for pipe in (speculative, plain):
        pipe.generate(**request, **{**keywords, "max_new_tokens": min(_WARM_UP, keywords["max_new_tokens"])})
    running = {
        "plain": stream_answer(plain, request, keywords),
        "speculative": stream_answer(speculative, request, keywords),
    }
    result = Race(StreamedAnswer(loaded.name, label(speculative)), StreamedAnswer(loaded.name, "none"))
    while running:
        method = min(running, key=lambda name: getattr(result, name).seconds)
        answer = next(running[method], None)
        if answer is None:
            del running[method]
        else:
            setattr(result, method, answer)
            yield result
    _compare(result, loaded, request, keywords)
    yield result


def _compare(result: Race, loaded: LoadedModel, request: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    speculative, plain = result.speculative, result.plain
    assert speculative.stats is not None
    assert plain.stats is not None
    if plain.stats.tokens_per_second and speculative.stats.tokens_per_second:
        result.decode_ratio = speculative.stats.tokens_per_second / plain.stats.tokens_per_second
    result.end_to_end_ratio = plain.seconds / speculative.seconds
    result.equal = speculative.token_ids == plain.token_ids
    if not result.equal:
        tokens = speculative.token_ids, plain.token_ids
        result.difference = first_difference(loaded.open("none"), request, keywords, *tokens)
