"""Grammars of requests: compiled on trial by worker processes, once for all requests that ask for the same one."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mmspec.errors import UserError
from mmspec.sampling.syntax import CheckedText
from mmspec.sampling.trial import GrammarTrial
from mmspec.workers import Stop

Constraint = tuple[str, str]
"""Kind and text of a grammar."""

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
