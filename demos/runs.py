"""Answers under way, token by token, and two of them racing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any, Literal

from demos.models import Loaded
from mmspec.compare import Difference, first_difference
from mmspec.pipeline import Piece, Pipeline
from mmspec.stats import Stats
from mmspec.stopping import FinishReason
from mmspec.trace import JudgedTree, Traced

Origin = Literal["first", "accepted", "bonus", "plain"]

_WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        text: what it adds; empty where later tokens complete a character.
        origin: from the prefill ("first"), drafted and accepted, the target's own behind these ("bonus"), or decoded
            without drafts ("plain").
        step: the verify pass that it came from, counted from 1; 0 is the prefill.
    """

    text: str
    origin: Origin
    step: int


@dataclass
class Run:
    """An answer under way.

    Attributes:
        drafter: its registered name, or "none".
        read: what single tokens read, special ones included.
        seconds: spent on it so far, the reading of images included.
        steps: the judged trees so far.
        stats, finish_reason: set when it has ended.
    """

    model: str
    drafter: str
    read: Callable[[list[int]], str] = field(default=str, repr=False)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    steps: list[JudgedTree] = field(default_factory=list)
    seconds: float = 0.0
    stats: Stats | None = None
    finish_reason: FinishReason | None = None

    def take(self, piece: Piece, steps: list[JudgedTree], decode: Callable[[list[int]], str]) -> None:
        """Add what a piece brought; ``steps``: all judged trees so far."""
        self.steps = list(steps)
        self.text += piece.text
        origins = self._origins(len(self.token_ids) + len(piece.token_ids))
        shown = "".join(token.text for token in self.tokens)
        for token_id in piece.token_ids:
            self.token_ids.append(token_id)
            text = decode(self.token_ids)
            whole = text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}")
            self.tokens.append(Token(text[len(shown) :] if whole else "", *origins[len(self.tokens)]))
            shown = text if whole else shown
        self.stats, self.finish_reason = piece.stats, piece.finish_reason

    def _origins(self, count: int) -> list[tuple[Origin, int]]:
        """Where the first ``count`` tokens come from; the steps may have emitted more, behind a stop."""
        if self.drafter == "none":
            return [("plain", number) for number in range(count)]
        found: list[tuple[Origin, int]] = [("first", 0)]
        for number, step in enumerate(self.steps, start=1):
            found += [("accepted", number)] * (len(step.path) - 1)
            found.append(("bonus" if len(step.tokens) > 1 else "plain", number))
        return found


def follow(pipe: Pipeline, drafter: str, request: Mapping[str, Any], keywords: Mapping[str, Any]) -> Iterator[Run]:
    """Answer a request, yielding the same ``Run`` whenever it has grown.

    Args:
        pipe: its drafter is traced, or None.
        drafter: what the run calls it.
        request: ``prompt``, ``images``, ``videos``.
        keywords: as for ``Pipeline.generate``.
    """
    run = Run(pipe.name, drafter, pipe.target.tokenizer.decode)
    pieces = pipe.stream(**request, **keywords)
    while True:
        start = clock()
        piece = next(pieces, None)
        run.seconds += clock() - start
        if piece is None:
            return
        steps = pipe.drafter.rows[0] if isinstance(pipe.drafter, Traced) and pipe.drafter.rows else []
        run.take(piece, steps, pipe.target.decode)
        yield run


@dataclass
class Race:
    """Two answers to one request. The figures that compare them are set when both have ended.

    Attributes:
        decode_ratio: speculative over plain tokens per second, decoding alone; None for answers of one token.
        end_to_end_ratio: plain over speculative seconds, reading of images and prefill included.
        equal: whether the tokens are the same.
        difference: where they part, if they do.
    """

    speculative: Run
    plain: Run
    decode_ratio: float | None = None
    end_to_end_ratio: float | None = None
    equal: bool | None = None
    difference: Difference | None = None

    @property
    def finished(self) -> bool:
        return self.equal is not None


def race(loaded: Loaded, drafter: str, request: Mapping[str, Any], keywords: Mapping[str, Any]) -> Iterator[Race]:
    """Answer a request speculatively and plainly, step by step in turn, each on its own clock.

    Whoever has used less time goes next, as with chess clocks: both get the same machine in the same minute, and
    neither slows the other down. A short run of each comes before, unmeasured.
    """
    label = loaded.label(drafter)
    for pipe in (loaded.pipeline(drafter), loaded.rival()):
        pipe.generate(**request, **{**keywords, "max_new_tokens": min(_WARM_UP, keywords["max_new_tokens"])})
    fast = follow(loaded.pipeline(drafter), label, request, keywords)
    slow = follow(loaded.rival(), "none", request, keywords)
    found = Race(Run(loaded.name, label), Run(loaded.name, "none"))
    racing = {"plain": slow, "speculative": fast}
    while racing:
        name = min(racing, key=lambda one: getattr(found, one).seconds)
        run = next(racing[name], None)
        if run is None:
            del racing[name]
        else:
            setattr(found, name, run)
            yield found
    _compare(found, loaded, request, keywords)
    yield found


def _compare(found: Race, loaded: Loaded, request: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    fast, slow = found.speculative, found.plain
    assert fast.stats is not None
    assert slow.stats is not None
    if slow.stats.tokens_per_second and fast.stats.tokens_per_second:
        found.decode_ratio = fast.stats.tokens_per_second / slow.stats.tokens_per_second
    found.end_to_end_ratio = slow.seconds / fast.seconds
    found.equal = fast.token_ids == slow.token_ids
    if not found.equal:
        found.difference = first_difference(loaded.target, request, keywords, fast.token_ids, slow.token_ids)
