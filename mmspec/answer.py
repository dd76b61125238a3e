"""Answers of a pipeline: a request in the engine, its text, whole or piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mmspec.engine.request import Call
from mmspec.engine.request_state import Wakeup
from mmspec.engine.stats import Stats
from mmspec.engine.stopping import FinishReason, Stopper
from mmspec.engine.trace import TreeRecord
from mmspec.errors import Attempt, UserError
from mmspec.sampling.logprobs import TokenLogprob
from mmspec.targets.processor import Detokenizer, is_token_ids

if TYPE_CHECKING:
    from mmspec.pipeline import Pipeline


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


class Answer:
    """A request in the engine, and the text of its answer."""

    def __init__(self, pipe: Pipeline, call: Call) -> None:
        self.pipe = pipe
        self.started = False
        call, packed = pipe.engine.core.pack(call)
        params, extras = pipe.defaults.complete(call.params), call.extras
        constraint = pipe.grammar(params)
        rendered = extras.chat_template and not is_token_ids(call.request["prompt"])
        rendering: dict[str, Any] = {} if rendered else {"chat_template": False}
        prompt = pipe.encode([call.request], **call.inputs, **rendering)
        length, limit = prompt.input_ids.shape[1], pipe.context_limit
        if limit is not None and length >= limit:
            raise UserError(f"the prompt must be shorter than the model's context of {limit} tokens: got {length}")
        assert params.max_new_tokens is not None
        stopper = Stopper(
            params.max_new_tokens,
            context_limit=limit,
            eos_token_ids=() if params.ignore_eos else pipe.target.eos_token_ids,
            stop=params.stop_strings,
            criteria=extras.stopping_criteria,
            device=pipe.target.device,
            tokenizer=pipe.io.tokenizer,
            max_time=extras.max_time,
        )
        sampler = pipe.defaults.sampler(params, prompt.input_ids, extras.logits_processor, constraint)
        recorded = {"trace": extras.trace, "logprobs": extras.logprobs, "call": packed}
        self._add = partial(pipe.add, prompt, sampler, stopper, extras.num_draft_tokens, **recorded)
        self.ended = False
        decode = partial(pipe.io.decode, **rendering)
        if constraint is not None:
            ends = stopper.eos_token_ids  # may be ordinary text, which the grammar does not contain
            trigger = params.grammar_trigger
            decode = partial(_decode_without, ends, partial(decode, verbatim=trigger is None))
            if trigger is not None and (token := pipe.io.special_token(trigger)) is not None:
                decode = partial(_decode_with, token, trigger, decode)
        self._detokenizer = Detokenizer(decode, params.stop_strings)
        self._pending: list[int] = []  # tokens of the next piece
        self._sent = 0  # tokens of earlier pieces

    def start(self, on_change: Callable[[], None]) -> Answer:
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
        """Raises the sequence's error, if any."""
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
        self.pipe.engine.remove([self.sequence])


def answer_all(pipe: Pipeline, calls: Iterable[Call | UserError], attempt: Attempt) -> list[Generation | UserError]:
    """Whole answers of several requests, at most twice ``max_num_seqs`` of them encoded at a time.

    Args:
        calls: requests, and mistakes, which are returned in their places.
        attempt: calls a function; what it does with a ``UserError`` is up to it (``raising``, ``returning``).
    """
    answers: list[Answer | UserError] = []
    wakeup = Wakeup()

    def known() -> list[Answer]:
        return [answer for answer in answers if isinstance(answer, Answer)]

    def ready() -> bool:
        return sum(not answer.done for answer in known()) < 2 * pipe.engine.max_num_seqs

    def start() -> None:
        with pipe.engine.together():
            for answer in known():
                if not answer.started:
                    answer.start(wakeup)

    def result(answer: Answer) -> Generation:
        wakeup.wait(lambda: answer.sequence.done)
        return answer.whole()

    try:
        for call in calls:
            if not ready():  # the inputs of waiting requests take memory
                start()
                wakeup.wait(ready)
            answers.append(attempt(partial(Answer, pipe, call)) if isinstance(call, Call) else call)
        start()
        return [attempt(partial(result, entry)) if isinstance(entry, Answer) else entry for entry in answers]
    finally:
        pipe.engine.remove(answer.sequence for answer in known() if answer.started)


def stream_answer(pipe: Pipeline, call: Call) -> Iterator[Piece]:
    """Pieces of an answer, as tokens are accepted. The request starts with the first ``next``; closing or dropping the
    iterator cancels it."""
    wakeup = Wakeup()
    answer = Answer(pipe, call).start(wakeup)
    try:
        while not answer.ended:
            wakeup.wait(lambda: answer.sequence.has_output)
            if (piece := answer.next()) is not None:
                yield piece
    finally:
        answer.cancel()


async def astream_answer(begin: Callable[[Callable[[], None]], Answer]) -> AsyncIterator[Piece]:
    """``stream_answer`` for asyncio. Cancelling the task or leaving the iteration cancels the request.

    Args:
        begin: starts the request, in another thread; takes a function for ``Answer.start``.
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


def _decode_without(tokens: Container[int], decode: Callable[..., str], token_ids: list[int], **options: Any) -> str:
    return decode([token for token in token_ids if token not in tokens], **options)


def _decode_with(token: int, text: str, decode: Callable[..., str], token_ids: list[int]) -> str:
    """Decode with a special token, of which other decoding leaves no text."""
    if token not in token_ids:
        return decode(token_ids)
    at = token_ids.index(token)
    return decode(token_ids[:at]) + text + decode(token_ids[at + 1 :], verbatim=True)
