"""Connections of the server: those of clients that send nothing, or read nothing, are closed."""

from __future__ import annotations

import asyncio
from time import perf_counter as clock
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 10.0
"""Time in which the head of a request must arrive, from the beginning of the connection or the last response on."""

READ_SECONDS, READ_BYTES = 30.0, 1 << 14
"""A client that is behind must read so many bytes of a response in this time."""


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """uvicorn's protocol, with an end of each time in which it would wait for a client.

    Bodies have a time of their own (``mmspec.serving.endpoints.BODY_SECONDS``).

    Args:
        most: connections; beyond, the one that has been without a request for the longest time is closed.
    """

    def __init__(self, *args: Any, most: int, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._most = most
        self._head: asyncio.TimerHandle | None = None
        self._read: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()
        known = [one for one in self.connections if not one.transport.is_closing()]
        if len(known) > self._most and (waiting := [one for one in known if one is not self and one.waits]):
            min(waiting, key=lambda one: one.since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._read):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read is not None:
            self._read.cancel()

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self.since = clock()  # the loop's own time may stand still
        self._head = self.loop.call_later(HEAD_SECONDS, self._without_head)

    def _without_head(self) -> None:
        if self.waits:
            self.transport.close()  # what is left of a response may still be sent
            self._await_reader()

    def _await_reader(self) -> None:
        """Close the connection unless its client goes on reading."""
        behind = self.transport.get_write_buffer_size()

        def check() -> None:
            if behind - self.transport.get_write_buffer_size() < READ_BYTES:
                self.transport.abort()
            else:
                self._await_reader()

        self._read = self.loop.call_later(READ_SECONDS, check)
