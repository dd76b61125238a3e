"""Answers of a pipeline: a request in the engine, its text, whole or piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from mmspec.engine.engine import Engine
from mmspec.engine.request import Request
from mmspec.engine.request_state import RequestState, Wakeup
from mmspec.engine.stats import Stats, TreeRecord
from mmspec.engine.stopping import FinishReason
from mmspec.errors import Attempt, UserError
from mmspec.sampling.logprobs import TokenLogprob
from mmspec.sampling.params import SamplingParams
from mmspec.targets.processor import Detokenizer, Processor


@dataclass(frozen=True)
class Generation:
    """One answer.

    ``token_ids`` are the generated tokens. ``text`` is their decoding up to a stop string, without the blank that some
    chat templates put before an answer ("ASSISTANT: answer"). ``trees`` are the verified trees, one per step, of a call
    with ``trace=True``. ``logprobs`` are those of the tokens, of a call with ``logprobs=K``.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    trees: list[TreeRecord] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer; the last one has ``finish_reason`` and ``stats``. ``trees`` are those of the answer
    so far, of a call with ``trace=True``. ``logprobs`` are those of ``token_ids``, of a call with ``logprobs=K``.
    ``seconds`` are those of the engine for the answer so far, waiting and prefill included."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    trees: list[TreeRecord] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)
    seconds: float = 0.0


class ActiveRequest:
    """A request in the engine, and the text of its answer.

    Args:
        engine: decodes it.
        add: queues it; takes ``on_change``.
        detokenizer: makes the text.
    """

    def __init__(self, engine: Engine, add: Callable[..., list[RequestState]], detokenizer: Detokenizer) -> None:
        self._engine, self._add, self._detokenizer = engine, add, detokenizer
        self.started = self.ended = False
        self._pending: list[int] = []  # tokens of the next piece
        self._sent = 0  # tokens of earlier pieces

    def start(self, on_change: Callable[[], None]) -> Self:
        """Queue the request; returns this.

        Args:
            on_change: called in another thread after each step in which it got tokens or ended.
        """
        (self.sequence,) = self._add(on_change=on_change)
        self.started = True
        return self

    @property
    def done(self) -> bool:
        return self.started and self.sequence.done

    def check(self) -> None:
        """Raise the sequence's error, if any."""
        if self.sequence.error is not None:
            raise self.sequence.error

    def whole(self) -> Generation:
        """The complete answer of an ended sequence. Raises the sequence's error, if any."""
        self.check()
        sequence, ids = self.sequence, self.sequence.token_ids
        text = self._detokenizer.text(ids)
        reason = sequence.finish_reason or "length"
        return Generation(text, ids, reason, sequence.stats, sequence.trees or [], sequence.logprobs[: len(ids)])

    def next(self) -> Piece | None:
        """The tokens since the last call; None before a character is whole."""
        sequence = self.sequence
        self.check()
        reason = sequence.finish_reason  # before the tokens: another thread may be adding some
        self.ended = reason is not None
        self._pending += sequence.take()
        text = self._detokenizer.new_text(sequence.token_ids, final=self.ended)
        if text is None:
            return None
        stats = sequence.stats if reason else None
        logprobs = sequence.logprobs[self._sent : self._sent + len(self._pending)]
        piece = Piece(
            text, self._pending, reason, stats, list(sequence.trees or ()), logprobs, sequence.stats.wall_seconds
        )
        self._sent += len(self._pending)
        self._pending = []
        return piece

    def cancel(self) -> None:
        """Remove the request from the engine. No effect after its end."""
        self._engine.remove([self.sequence])


def answer_all(
    engine: Engine,
    requests: Iterable[Request | UserError],
    activate: Callable[[Request], ActiveRequest],
    attempt: Attempt,
) -> list[Generation | UserError]:
    """Whole answers of several requests, at most twice ``max_num_seqs`` of them encoded at a time.

    Args:
        requests: those, and mistakes, which are returned in their places.
        activate: encodes a request.
        attempt: calls a function; what it does with a ``UserError`` is up to it (``raising``, ``returning``).
    """
    answers: list[ActiveRequest | UserError] = []
    wakeup = Wakeup()

    def known() -> list[ActiveRequest]:
        return [answer for answer in answers if isinstance(answer, ActiveRequest)]

    def ready() -> bool:
        return sum(not answer.done for answer in known()) < 2 * engine.max_num_seqs

    def start() -> None:
        with engine.together():
            for answer in known():
                if not answer.started:
                    answer.start(wakeup)

    def result(answer: ActiveRequest) -> Generation:
        wakeup.wait(lambda: answer.sequence.done)
        return answer.whole()

    try:
        for request in requests:
            if not ready():  # the inputs of waiting requests take memory
                start()
                wakeup.wait(ready)
            answers.append(attempt(partial(activate, request)) if isinstance(request, Request) else request)
        start()
        return [attempt(partial(result, entry)) if isinstance(entry, ActiveRequest) else entry for entry in answers]
    finally:
        engine.remove(answer.sequence for answer in known() if answer.started)


def stream_answer(begin: Callable[[Callable[[], None]], ActiveRequest]) -> Iterator[Piece]:
    """Pieces of an answer, as tokens are accepted. Closing or dropping the iterator cancels the request.

    Args:
        begin: starts the request with the first ``next``; takes a function for ``ActiveRequest.start``.
    """
    wakeup = Wakeup()
    answer = begin(wakeup)
    try:
        while not answer.ended:
            wakeup.wait(lambda: answer.sequence.has_output)
            if (piece := answer.next()) is not None:
                yield piece
    finally:
        answer.cancel()


async def astream_answer(begin: Callable[[Callable[[], None]], ActiveRequest]) -> AsyncIterator[Piece]:
    """``stream_answer`` for asyncio. Cancelling the task or leaving the iteration cancels the request.

    ``begin`` is called in another thread.
    """
    changed, loop = asyncio.Event(), asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(changed.set)

    starting = asyncio.ensure_future(asyncio.to_thread(begin, wake))
    try:
        answer = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})  # the thread cannot be ended
        if starting.exception() is None:
            starting.result().cancel()
        raise
    try:
        while not answer.ended:
            await changed.wait()
            changed.clear()
            if (piece := answer.next()) is not None:
                yield piece
    finally:
        answer.cancel()


def answer_decoder(
    processor: Processor, params: SamplingParams, eos_token_ids: Container[int], **options: Any
) -> Callable[[list[int]], str]:
    """Function that decodes an answer's tokens.

    Args:
        eos_token_ids: tokens that end the answer; they may be ordinary text, which a grammar does not contain.
        **options: of ``Processor.decode``.
    """
    decode: Callable[..., str] = partial(processor.decode, **options)
    if params.constraint is None:
        return decode
    trigger = params.grammar_trigger
    token = None if trigger is None else processor.special_token(trigger)

    def text(token_ids: list[int], verbatim: bool) -> str:
        return decode([token for token in token_ids if token not in eos_token_ids], verbatim=verbatim)

    def whole_text(token_ids: list[int]) -> str:
        if trigger is None or token is None or token not in token_ids:
            return text(token_ids, verbatim=trigger is None)
        at = token_ids.index(token)  # decoding leaves no text of a special token
        return text(token_ids[:at], False) + trigger + text(token_ids[at + 1 :], True)

    return whole_text
