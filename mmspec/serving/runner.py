"""Runs the choices of requests on a pipeline, within the server's slots and the requests' time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from time import perf_counter as clock
from typing import Any, Protocol, TypeVar

from mmspec.errors import UserError
from mmspec.pipeline import Piece, Pipeline
from mmspec.sampling.grammar import BeyondEndError
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.syntax import CheckedText
from mmspec.sampling.trial import GrammarTrial
from mmspec.serving.builder import Constraint, GenerationJob
from mmspec.serving.errors import APIError
from mmspec.serving.media import MediaReader
from mmspec.serving.metrics import Metrics
from mmspec.workers import Stop


class Admission(Protocol):
    """Admission of choices: a server's own ``Slots``, or slots that it shares."""

    @property
    def running(self) -> int:
        """Slots in use."""

    @property
    def waiting(self) -> int:
        """Slots that are waited for."""

    async def acquire(self, count: int) -> None:
        """Wait for slots; see ``Slots.acquire``."""

    def release(self, count: int = 1) -> None:
        """Give slots back."""


class Slots:
    """Slots for decoding, given in the order of arrival. Used from one event loop only.

    Args:
        size: slots.
        longest: slots that may be waited for; further requests are refused.

    Attributes:
        running: slots in use.
    """

    def __init__(self, size: int, longest: int) -> None:
        self.size, self.longest = size, longest
        self.running = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Slots that are waited for."""
        return sum(count for count, _ in self._queue)

    async def acquire(self, count: int) -> None:
        """Wait for ``count`` slots.

        Raises:
            APIError: status 429, the queue is full.
        """
        if not self._queue and self.running + count <= self.size:
            self.running += count
            return
        if self.waiting + count > self.longest:
            message = f"the server is busy: at most {self.longest} choices may wait, and {self.waiting} do; try again"
            raise APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        granted = asyncio.get_running_loop().create_future()
        entry = (count, granted)
        self._queue.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
                self._grant()  # later entries may fit
            elif not granted.cancelled():  # granted in the same turn of the loop
                self.release(count)
            raise

    def release(self, count: int = 1) -> None:
        """Give slots back."""
        self.running -= count
        self._grant()

    def _grant(self) -> None:
        while self._queue:
            count, granted = self._queue[0]
            if granted.cancelled():
                self._queue.popleft()
            elif self.running + count <= self.size:
                self._queue.popleft()
                self.running += count
                granted.set_result(None)
            else:
                return


_WORKERS = 2
_KEPT = 64  # results, of at most 128 KiB each


class GrammarChecker:
    """Checks the grammars of untrusted requests. Used from one event loop only."""

    def __init__(self) -> None:
        self._trial = GrammarTrial(workers=_WORKERS)
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
        self._running: dict[Constraint, _Check] = {}
        self._results: dict[Constraint, CheckedText | UserError] = {}  # the last used one at the end

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    async def check(self, constraint: Constraint) -> CheckedText:
        """Check a grammar. Where no request waits for it any more, its worker is ended, and that is waited for.

        Raises:
            UserError: see ``GrammarTrial.check``.
        """
        result = self._results.pop(constraint, None)
        if result is None:
            result = await self._checked(constraint)
        self._results[constraint] = result
        while len(self._results) > _KEPT:
            del self._results[next(iter(self._results))]
        if isinstance(result, UserError):
            raise UserError(str(result))
        return result

    async def _checked(self, constraint: Constraint) -> CheckedText | UserError:
        check = self._running.get(constraint)
        if check is None:
            stop = Stop()
            future = self._threads.submit(self._trial.check, *constraint, stop=stop)
            check = self._running[constraint] = _Check(future, stop)
        check.waiting += 1
        done = asyncio.wrap_future(check.future)
        try:
            return await asyncio.shield(done)
        except UserError as error:
            return error
        except asyncio.CancelledError:
            if check.waiting == 1:
                self._running.pop(constraint, None)  # a later request begins anew
                check.stop()
                check.future.cancel()
                await asyncio.wait({done})
            raise
        finally:
            check.waiting -= 1
            if check.future.done() and self._running.get(constraint) is check:
                del self._running[constraint]


@dataclass
class _Check:
    """A grammar that is being checked.

    Attributes:
        waiting: requests that wait for the result.
    """

    future: Future[CheckedText]
    stop: Stop
    waiting: int = 0


Pieces = AsyncIterator[tuple[int, Piece]]
"""Pieces of a request's choices as they arrive, each with the number of its choice."""


class RequestRunner:
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
    async def start(self, job: GenerationJob) -> AsyncIterator[Pieces]:
        """Wait for slots and start a request. Leaving the block cancels what has not ended, and frees its slots.

        The choices do not wait for the reader of their pieces: a slow client occupies no slot.

        Raises:
            APIError: the queue is full, an image or video cannot be read, or the request's time has passed.
            UserError: the grammar is not valid, or exceeds a limit. The pieces' iterator raises what the pipeline
                raises, and at the end of the request's time.
        """
        arrived, deadline = clock(), Deadline(self._seconds)
        await deadline.wait(self.slots.acquire(job.choices))
        try:
            params, media = await deadline.wait(self._prepared(job))
        except BaseException:
            self.slots.release(job.choices)
            raise
        pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        tasks = []
        for index in range(job.choices):
            task = asyncio.create_task(self._choice(job, index, params, media, pieces, arrived))
            task.add_done_callback(lambda _: self.slots.release())  # also of a task that is cancelled before it starts
            tasks.append(task)
        try:
            yield _iterate(pieces, len(tasks), deadline)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepared(self, job: GenerationJob) -> tuple[SamplingParams, Mapping[str, Any]]:
        """Parameters of a job's first choice, with its grammar, and its media."""
        grammar: dict[str, Any] = {}
        if job.constraint is not None:
            if job.sampling.get("ignore_eos"):
                raise APIError(400, f"ignore_eos does not go with {job.grammar}, which ends the output", "ignore_eos")
            try:
                checked = await self.grammars.check(job.constraint)
            except UserError as error:
                raise await self._located(error, job.schemas) from None
            grammar = {job.constraint[0]: checked, "grammar_trigger": job.trigger}
        return SamplingParams(**job.sampling, **grammar), await self.media.read(job.media)

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
        job: GenerationJob,
        index: int,
        params: SamplingParams,
        media: Mapping[str, Any],
        pieces: asyncio.Queue[tuple[int, Piece | Exception]],
        arrived: float,
    ) -> None:
        prompt, number = divmod(index, job.n)
        before = None
        try:
            if params.seed is not None and number:
                params = replace(params, seed=(params.seed + number) % (1 << 64))
            stream = self.pipe.astream(job.prompts[prompt], **media, params=params, **job.keywords)
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
            pieces.put_nowait((index, APIError(400, error.message("min_tokens", job.grammar), "min_tokens")))
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
