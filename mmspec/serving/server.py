"""Runs the application with uvicorn: socket, connections, signals, shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread, Timer
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from mmspec.errors import UserError
from mmspec.serving.limits import Limits
from mmspec.serving.middleware import Unready, log_to_stderr

if TYPE_CHECKING:
    from mmspec.engine.engine import Engine


HEAD_SECONDS = 10.0
"""Time in which the head of a request must arrive, from the beginning of the connection or the last response on."""

READ_SECONDS, READ_BYTES = 30.0, 1 << 14
"""A client that is behind must read so many bytes of a response in this time."""


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """uvicorn's protocol, with an end of each time in which it would wait for a client.

    Bodies have a time of their own (``mmspec.serving.app.BODY_SECONDS``).

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


_THREADS = 0.75  # seconds that threads have to end after the requests: one that compiles or encodes cannot be ended
IDLE_CONNECTIONS = 256
"""Connections without a request, which clients keep for their next request."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address; port 0 selects a free one.

    Raises:
        UserError: the address cannot be bound.
    """
    name = host.strip("[]")
    found = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((name, port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return found


@contextmanager
def loading(listening: socket.socket) -> Iterator[None]:
    """Answer with status 503 during the block, in which a model is loaded; later requests wait for ``run``."""
    server = uvicorn.Server(uvicorn.Config(Unready("loading its model"), **_options(IDLE_CONNECTIONS)))
    thread = Thread(target=server.run, kwargs={"sockets": [listening.dup()]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _options(connections: int) -> dict[str, Any]:
    """Options of uvicorn.

    Args:
        connections: at most open at a time.
    """
    quiet = {"log_level": "warning", "access_log": False, "server_header": False}
    return {"http": partial(Connection, most=connections), "ws": "none", **quiet}


class Server(uvicorn.Server):
    """uvicorn's server, which ends running requests with responses: see ``mmspec.serving.middleware``.

    Args:
        limits: after ``shutdown_timeout``, requests that still run are cancelled.

    Attributes:
        abandon: end the process if its threads have not ended some seconds after its requests.
    """

    abandon = False

    def __init__(self, app: FastAPI, limits: Limits) -> None:
        options = _options(limits.requests + IDLE_CONNECTIONS)
        super().__init__(uvicorn.Config(app, lifespan="on", timeout_graceful_shutdown=1, **options))
        self._grace = limits.shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.abandon:
            status = 130 if signal.SIGINT in self._captured_signals else 0
            last = Timer(self._grace + _THREADS, os._exit, [status])
            last.daemon = True
            last.start()
        await self.config.app.state.drain.close(self._grace)  # type: ignore[union-attr]
        await super().shutdown(sockets)


def run(app: FastAPI, limits: Limits, listening: socket.socket, engine: Engine) -> NoReturn:
    """Serve until SIGTERM or SIGINT; running requests then have ``limits.shutdown_timeout`` seconds to end.

    SIGTERM closes the engine and ends the process: the interpreter's own end takes seconds, for it frees all objects
    one by one.

    Raises:
        KeyboardInterrupt: after SIGINT.
    """
    log_to_stderr(limits.log_level)
    # After its shutdown uvicorn raises the signal again, which would end the process with another exit status.
    with _on_sigterm(lambda: None):
        server = Server(app, limits)
        server.abandon = True
        server.run(sockets=[listening])
    engine.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wait_for_sigterm() -> None:
    """Wait until the process receives SIGTERM.

    Raises:
        KeyboardInterrupt: SIGINT came first.
    """
    received = Event()
    with _on_sigterm(received.set):
        received.wait()


@contextmanager
def _on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
