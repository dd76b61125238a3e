"""The order of requests: several run together, races alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Condition
from typing import TypeVar

from mmspec.errors import UserError

T = TypeVar("T")

RUNNING = 8
"""Requests that are answered at the same time; further ones wait."""

WAITING = 24
"""Requests that wait for their turn; further ones are rejected."""

_POLL = 0.5  # seconds after which a request that waits for its turn can be cancelled


@dataclass(frozen=True, eq=False)
class Turn:
    """The place of a request.

    Attributes:
        alone: whether it must run alone.
    """

    alone: bool = False


class Turns:
    """Turns of requests, in the order of their arrival. Threads may share it.

    Requests that arrive after one that must run alone begin when it has ended.
    """

    def __init__(self) -> None:
        self._turns: list[Turn] = []  # that run or wait
        self._changed = Condition()  # on a re-entrant lock: a garbage-collected request ends in any thread

    def join(self, count: int = 1, *, alone: bool = False) -> list[Turn]:
        """New turns after all others.

        Raises:
            UserError: too many requests wait already.
        """
        with self._changed:
            if len(self._turns) + count > RUNNING + WAITING:
                raise UserError(f"the server is busy with {RUNNING + WAITING} requests: try again in a minute")
            joined = [Turn(alone) for _ in range(count)]
            self._turns += joined
            return joined

    def ahead(self, turn: Turn, seconds: float = 0.0) -> int | None:
        """Number of requests before one that may not begin within ``seconds``; None if it may."""

        def earlier() -> list[Turn]:
            turns = list(self._turns)  # a request that is collected here leaves in this thread
            return turns[: turns.index(turn)]

        def free() -> bool:
            before = earlier()
            return not before if turn.alone else len(before) < RUNNING and not any(other.alone for other in before)

        with self._changed:
            return None if self._changed.wait_for(free, seconds) else len(earlier())

    def leave(self, turns: Iterable[Turn]) -> None:
        """Requests have ended, or wait no more."""
        with self._changed:
            for turn in turns:
                self._turns.remove(turn)
            self._changed.notify_all()

    def run(self, work: Iterator[T], waiting: Callable[[int], T], *, alone: bool = False) -> Iterator[T]:
        """Run a request together with others, or while no other runs.

        Args:
            work: the request's steps. Closing the iterator that is returned ends it.
            waiting: result for the number of requests ahead, yielded now and then until the request begins.

        Raises:
            UserError: see ``join``.
        """
        joined = self.join(alone=alone)
        try:
            seconds = 0.0  # the place is known at once
            while (ahead := self.ahead(joined[0], seconds)) is not None:
                yield waiting(ahead)
                seconds = _POLL
            yield from work
        finally:
            self.leave(joined)
