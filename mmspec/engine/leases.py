"""Locks on targets and drafters: engines that share one decode one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic as clock
from typing import Any

from mmspec.errors import UserError

PATIENCE = 10.0
"""Timeout in seconds for an engine that no thread drives, as with an unfinished stream: the thread that would resume it
may be the one that waits, which cannot be detected."""

_CHANGED = threading.Condition()  # re-entrant: garbage collection of a stream may release its lease anywhere
_HOLDERS: dict[int, Lease] = {}  # by id of the held object, which the lease keeps alive


class Lease:
    """An engine's exclusive lock on a target and a drafter, held while it has sequences.

    Args:
        target, drafter: the drafter may be None. Wrapped drafters (``drafter``, ``drafters``) are locked too.
        drafter_only: do not lock the target.
    """

    def __init__(self, target: Any, drafter: Any, *, drafter_only: bool = False) -> None:
        self._target, self._drafter = target, drafter
        self._parts: list[Any] = [] if drafter_only else [target]
        pending = [drafter] if drafter is not None else []
        while pending:
            part = pending.pop()
            self._parts.append(part)
            wrapped = getattr(part, "drafter", None)
            pending += [*getattr(part, "drafters", ()), *([wrapped] if wrapped is not None else [])]
        self._held = False
        self._driver: threading.Thread | None = None  # runs a step now
        self._users: set[threading.Thread] = set()  # that have added or driven sequences since the lock was acquired
        self._since = 0.0

    def acquire(self) -> None:
        """Acquire the lock; blocks until other holders have no sequences left.

        Raises:
            UserError: possible deadlock: only this thread and dead ones have used the holder, or no step ran
                for ``PATIENCE`` seconds.
        """
        with _CHANGED:
            if self._held:
                self._users.add(threading.current_thread())
                return
            while holders := [_HOLDERS[id(part)] for part in self._parts if id(part) in _HOLDERS]:
                for holder in holders:
                    holder._check_deadlock()
                _CHANGED.wait(PATIENCE / 10)
            _HOLDERS.update({id(part): self for part in self._parts})
            self._held, self._users, self._since = True, {threading.current_thread()}, clock()
        if self._drafter is not None:
            try:
                self._drafter.attach(self._target)  # another engine may have attached it elsewhere
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Release the lock, if held."""
        with _CHANGED:
            if self._held:
                for part in self._parts:
                    del _HOLDERS[id(part)]
            self._held = False
            _CHANGED.notify_all()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Mark the current thread as the engine's driver."""
        self._driver = threading.current_thread()
        self._users.add(self._driver)
        try:
            yield
        finally:
            self._driver, self._since = None, clock()

    def _check_deadlock(self) -> None:
        me = threading.current_thread()
        if self._driver is not None and self._driver is not me:
            return
        others = any(user.is_alive() for user in self._users - {me})
        if self._driver is me or not others or clock() - self._since > PATIENCE:
            raise UserError(
                "a target or drafter serves one pipeline at a time: another pipeline has a stream that is not "
                "finished, finish or close it first"
            )
