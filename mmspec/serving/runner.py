"""Runs the choices of requests on a pipeline, within the server's slots and the requests' time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter as clock
from typing import Any, TypeVar

from mmspec.answer import Piece
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.grammar import BeyondEndError
from mmspec.sampling.params import SamplingParams
from mmspec.serving.errors import APIError
from mmspec.serving.grammars import Constraint, GrammarChecker
from mmspec.serving.media import MediaReader, Medium
from mmspec.serving.metrics import Metrics
from mmspec.serving.slots import Admission

Pieces = AsyncIterator[tuple[int, Piece]]
"""Pieces of a request's choices as they arrive, each with the number of its choice."""


@dataclass(frozen=True)
class Work:
    """What a request asks for.

    Attributes:
        prompts: texts, or chat messages; each is answered ``n`` times, its choices one after the other.
        params: of the first choice of each prompt; the seed of the i-th is larger by i, as in vLLM.
        constraint: the grammar of the outputs, which is not among ``params`` yet.
        media: images and videos, of a request with one prompt.
        keywords: further ones of ``Pipeline.stream``.
        trigger: the text after which the grammar begins; None for the beginning of the output.
        schemas: the schemas of tools and outputs that the grammar was made of, by what errors call them.
    """

    prompts: Sequence[Any]
    params: SamplingParams
    constraint: Constraint | None
    n: int
    media: Sequence[Medium]
    keywords: Mapping[str, Any]
    trigger: str | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def grammar(self) -> str:
        """The fields of the request that the grammar was made of."""
        if not self.schemas:
            return "response_format"
        return "tools or response_format" if "response_format" in self.schemas else "tools"


class Runner:
    """Runs requests: a choice has a slot from the check of its grammar and the reading of its media to its last token.

    Args:
        pipe: answers; its ``max_num_seqs`` is at least as many.
        seconds: in which a request must end; 0 is no limit.
    """

    def __init__(
        self,
        pipe: Pipeline,
        media: MediaReader,
        grammars: GrammarChecker,
        slots: Admission,
        metrics: Metrics,
        seconds: float = 0,
    ) -> None:
        self.pipe, self.media, self.grammars, self.slots, self.metrics = pipe, media, grammars, slots, metrics
        self._seconds = seconds

    def close(self) -> None:
        self.media.close()
        self.grammars.close()

    @asynccontextmanager
    async def start(self, work: Work) -> AsyncIterator[Pieces]:
        """Wait for slots and start a request. Leaving the block cancels what has not ended, and frees its slots.

        The choices do not wait for the reader of their pieces: a slow client occupies no slot.

        Raises:
            APIError: the queue is full, an image or video cannot be read, or the request's time has passed.
            UserError: the grammar is not valid, or exceeds a limit. The pieces' iterator raises what the pipeline
                raises, and at the end of the request's time.
        """
        arrived, deadline = clock(), Deadline(self._seconds)
        await deadline.wait(self.slots.acquire(work.choices))
        try:
            work, media = await deadline.wait(self._prepared(work))
        except BaseException:
            self.slots.release(work.choices)
            raise
        pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        tasks = []
        for index in range(work.choices):
            task = asyncio.create_task(self._choice(work, index, media, pieces, arrived))
            task.add_done_callback(lambda _: self.slots.release())  # also of a task that is cancelled before it starts
            tasks.append(task)
        try:
            yield _iterate(pieces, len(tasks), deadline)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepared(self, work: Work) -> tuple[Work, Mapping[str, Any]]:
        """Work with its grammar among its parameters, and its media."""
        if work.constraint is not None:
            kind, _ = work.constraint
            if work.params.ignore_eos:
                raise APIError(400, f"ignore_eos does not go with {work.grammar}, which ends the output", "ignore_eos")
            try:
                checked: Any = {kind: await self.grammars.check(work.constraint)}
            except UserError as error:
                raise await self._located(error, work.schemas) from None
            work = replace(work, params=replace(work.params, **checked, grammar_trigger=work.trigger))
        return work, await self.media.read(work.media)

    async def _located(self, error: UserError, schemas: Mapping[str, str]) -> Exception:
        """The error of a grammar, with the name of the schema that is wrong, if one of several is."""
        for name, schema in schemas.items():
            try:
                await self.grammars.check(("json_schema", schema))
            except UserError as own:
                return APIError(400, f"{name}: {own}", name if name == "response_format" else "tools")
        return APIError(400, f"tools: {error}", "tools") if schemas else error

    async def _choice(
        self,
        work: Work,
        index: int,
        media: Mapping[str, Any],
        pieces: asyncio.Queue[tuple[int, Piece | Exception]],
        arrived: float,
    ) -> None:
        prompt, number = divmod(index, work.n)
        params, before = work.params, None
        try:
            if params.seed is not None and number:
                params = replace(params, seed=(params.seed + number) % (1 << 64))
            stream = self.pipe.astream(work.prompts[prompt], **media, params=params, **work.keywords)
            async with aclosing(stream):  # type: ignore[type-var]
                async for piece in stream:
                    now = clock()
                    if before is None:
                        self.metrics.first_token.observe(now - arrived)
                    else:
                        self.metrics.next_tokens.observe(now - before)
                    before = now
                    if piece.stats is not None:
                        self.metrics.ended(piece.stats, str(piece.finish_reason))
                    pieces.put_nowait((index, piece))
        except BeyondEndError as error:
            pieces.put_nowait((index, APIError(400, error.message("min_tokens", work.grammar), "min_tokens")))
        except Exception as error:
            pieces.put_nowait((index, error))


async def _iterate(pieces: asyncio.Queue[tuple[int, Piece | Exception]], choices: int, deadline: Deadline) -> Pieces:
    while choices:
        index, piece = await deadline.wait(pieces.get())
        if isinstance(piece, Exception):
            raise piece
        choices -= piece.finish_reason is not None
        yield index, piece


T = TypeVar("T")


class Deadline:
    """The end of a request's time, which begins now.

    Args:
        seconds: from now; 0 is no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds if seconds else None

    async def wait(self, work: Awaitable[T]) -> T:
        """Await ``work``, and cancel it at the end of the time.

        Raises:
            APIError: status 504, the time has passed. Clients should not send the same request again by themselves.
        """
        try:
            async with asyncio.timeout_at(self._end) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
        message = f"a request must end within {self._seconds:g} s (--request-timeout): this one had not"
        raise APIError(504, message, code="timeout", headers={"x-should-retry": "false"})
