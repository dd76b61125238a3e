"""Runs the application with uvicorn: socket, signals, shutdown."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread, Timer
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from fastapi import FastAPI

from mmspec.errors import UserError
from mmspec.serving.connections import Connection
from mmspec.serving.drain import Unready
from mmspec.serving.limits import Limits

if TYPE_CHECKING:  # a process that only deploys replicas needs no torch
    from mmspec.engine.engine import Engine

_THREADS = 0.75  # seconds that threads have to end after the requests: one that compiles or encodes cannot be ended

IDLE_CONNECTIONS = 256
"""Connections without a request: those that clients keep for their next one."""


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
    """uvicorn's server, which ends running requests with responses: see ``mmspec.serving.drain``.

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
