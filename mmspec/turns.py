"""Turns: a target and a drafter hold the state of one request, so that requests run on them one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic as clock
from typing import Any

from mmspec.errors import UserError

PATIENCE = 10.0
"""Seconds that a request waits for a stream that nobody resumes. The thread that would resume it may be waiting for
this request, which cannot be detected: giving up rules out a deadlock."""

_CHANGED = threading.Condition()  # on a re-entrant lock: a collected stream may end its turn at any place of a thread
_HOLDERS: dict[int, Turn] = {}  # by id of what is held; a turn keeps these objects alive


class Turn:
    """The exclusive use of a target and a drafter for one request, as a context.

    Requests of other threads wait until it ends. ``UserError`` is raised where waiting might never end: in the thread
    that runs the request or resumed the stream last, after that thread's end, or when the stream was not resumed for
    ``PATIENCE`` seconds.

    Args:
        parts: the target and the drafter; None is skipped. What a drafter wraps (its ``drafter`` or
            ``drafters``) is held with it.
    """

    def __init__(self, *parts: Any) -> None:
        self._parts: list[Any] = []
        pending = [part for part in parts if part is not None]
        while pending:
            part = pending.pop()
            self._parts.append(part)
            wrapped = getattr(part, "drafter", None)
            pending += [*getattr(part, "drafters", ()), *([wrapped] if wrapped is not None else [])]
        self._thread = threading.current_thread()
        self._paused_at: float | None = None

    def __enter__(self) -> Turn:
        with _CHANGED:
            while holders := [_HOLDERS[id(part)] for part in self._parts if id(part) in _HOLDERS]:
                for holder in holders:
                    holder._refuse_vain_waiting()
                _CHANGED.wait(PATIENCE / 10)
            self._thread = threading.current_thread()
            _HOLDERS.update({id(part): self for part in self._parts})
        return self

    def __exit__(self, *_: object) -> None:
        with _CHANGED:
            for part in self._parts:
                _HOLDERS.pop(id(part), None)
            _CHANGED.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a stream's consumer has control, until some thread resumes or closes the stream."""
        self._paused_at = clock()
        try:
            yield
        finally:
            self._thread = threading.current_thread()
            self._paused_at = None

    def _refuse_vain_waiting(self) -> None:
        mine, paused_at = self._thread is threading.current_thread(), self._paused_at
        if paused_at is None and mine:
            raise UserError("a pipeline serves one request at a time: this one was made while another is decoding")
        abandoned = paused_at is not None and (mine or clock() - paused_at > PATIENCE)
        if abandoned or not self._thread.is_alive():
            raise UserError(
                "a pipeline serves one request at a time: a stream is not finished, finish or close it first"
            )
