"""Exclusive use of targets and drafters by engines: two engines that share one decode one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic as clock
from typing import Any

from mmspec.errors import UserError

PATIENCE = 10.0
"""Seconds to wait for an engine that no thread drives: a stream that is not finished. The thread that would resume it
may be waiting here, which cannot be detected: giving up rules out a deadlock."""

_CHANGED = threading.Condition()  # on a re-entrant lock: a collected stream may release its lease anywhere
_HOLDERS: dict[int, Lease] = {}  # by id of what is held; a lease keeps these objects alive


class Lease:
    """An engine's exclusive use of a target and a drafter, from its first sequence to its last.

    Args:
        target, drafter: the drafter may be None. What it wraps (its ``drafter`` or ``drafters``) is held with it.
        drafter_only: do not hold the target.
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
        self._driver: threading.Thread | None = None  # the thread in a step
        self._last = threading.current_thread()  # that drove it, or began to hold it
        self._since = 0.0

    def acquire(self) -> None:
        """Hold the parts; waits for other engines until they have no sequences left.

        Raises:
            UserError: waiting might never end: this thread drives the other engine or was the last one to, that thread
                has ended, or nothing happened for ``PATIENCE`` seconds.
        """
        with _CHANGED:
            if self._held:
                return
            while holders := [_HOLDERS[id(part)] for part in self._parts if id(part) in _HOLDERS]:
                for holder in holders:
                    holder._refuse_vain_waiting()
                _CHANGED.wait(PATIENCE / 10)
            _HOLDERS.update({id(part): self for part in self._parts})
            self._held, self._last, self._since = True, threading.current_thread(), clock()
        if self._drafter is not None:
            try:
                self._drafter.attach(self._target)  # another engine may have attached it to its own target
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Leave the parts to other engines; without effect if they are not held."""
        with _CHANGED:
            if self._held:
                for part in self._parts:
                    del _HOLDERS[id(part)]
            self._held = False
            _CHANGED.notify_all()

    @contextmanager
    def used(self) -> Iterator[None]:
        """While a thread drives the engine."""
        self._driver = self._last = threading.current_thread()
        try:
            yield
        finally:
            self._driver, self._since = None, clock()

    def _refuse_vain_waiting(self) -> None:
        mine = self._last is threading.current_thread()
        if self._driver is not None and not mine:
            return
        if mine or not self._last.is_alive() or clock() - self._since > PATIENCE:
            raise UserError(
                "a target or drafter serves one pipeline at a time: another pipeline has a stream that is not "
                "finished, finish or close it first"
            )
