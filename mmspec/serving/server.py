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
    """uvicorn's protocol with timeouts for slow clients and a limit on connections.

    Bodies have a separate timeout (``mmspec.serving.app.BODY_SECONDS``).

    Args:
        most: maximum number of connections; beyond it, the longest idle connection is closed.
    """

    def __init__(self, *args: Any, most: int, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._most = most
        self._head: asyncio.TimerHandle | None = None
        self._read: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether the connection is idle: no request is being answered."""
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
        self.since = clock()  # loop.time() may be frozen
        self._head = self.loop.call_later(HEAD_SECONDS, self._without_head)

    def _without_head(self) -> None:
        if self.waits:
            self.transport.close()  # still sends the rest of a response
            self._await_reader()

    def _await_reader(self) -> None:
        """Close the connection unless its client continues reading."""
        behind = self.transport.get_write_buffer_size()

        def check() -> None:
            if behind - self.transport.get_write_buffer_size() < READ_BYTES:
                self.transport.abort()
            else:
                self._await_reader()

        self._read = self.loop.call_later(READ_SECONDS, check)


_THREADS = 0.75  # seconds to wait for threads after the requests: compiling or encoding cannot be interrupted
IDLE_CONNECTIONS = 256
"""Connections without a request, which clients keep for their next request."""


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port.

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
    """Answer with status 503 during the block, while a model is loaded; later requests wait for ``run``."""
    server = uvicorn.Server(uvicorn.Config(Unready("loading its model"), **_options(IDLE_CONNECTIONS)))
    thread = Thread(target=server.run, kwargs={"sockets": [listening.dup()]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _options(connections: int) -> dict[str, Any]:
    """uvicorn's options.

    Args:
        connections: maximum number of open connections.
    """
    quiet = {"log_level": "warning", "access_log": False, "server_header": False}
    return {"http": partial(Connection, most=connections), "ws": "none", **quiet}


class Server(uvicorn.Server):
    """uvicorn's server with graceful shutdown: running requests end with a response (``mmspec.serving.middleware``).

    Args:
        limits: ``shutdown_timeout`` is the time before running requests are cancelled.

    Attributes:
        abandon: exit the process if its threads outlive its requests by some time.
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
    """Serve until SIGTERM or SIGINT; running requests then have ``limits.shutdown_timeout`` seconds to finish.

    SIGTERM closes the engine and exits the process directly: the interpreter's finalization takes seconds.

    Raises:
        KeyboardInterrupt: after SIGINT.
    """
    log_to_stderr(limits.log_level)
    # uvicorn raises the signal again after shutdown, which would change the exit status.
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
        KeyboardInterrupt: SIGINT arrived first.
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
