"""Runs the application with uvicorn: socket, signals, shutdown."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread, Timer
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from fastapi import FastAPI

from mmspec.errors import UserError
from mmspec.serving.middleware import Unready, log_to_stderr
from mmspec.serving.settings import Limits
from mmspec.workers import on_signals

if TYPE_CHECKING:
    from mmspec.engine.engine import Engine

_THREADS = 0.75  # seconds to wait for threads after the requests: compiling or encoding cannot be interrupted
_OPTIONS: dict[str, Any] = {"ws": "none", "log_level": "warning", "access_log": False, "server_header": False}
_IDLE_CONNECTIONS = 256  # without a request, which clients keep for their next request


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port. Raises ``UserError``: the address cannot be bound."""
    name = host.strip("[]")
    family, both = (socket.AF_INET6, socket.has_dualstack_ipv6()) if ":" in name else (socket.AF_INET, False)
    try:
        return socket.create_server((name, port), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # and the address again
        raise UserError(f"cannot listen on {host}, port {port}: {reason}") from error


@contextmanager
def loading(listening: socket.socket) -> Iterator[None]:
    """Answer with status 503 during the block, while a model is loaded; later requests wait for ``run``."""
    server = uvicorn.Server(uvicorn.Config(Unready("loading its model"), **_OPTIONS))
    thread = Thread(target=server.run, kwargs={"sockets": [listening.dup()]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


class Server(uvicorn.Server):
    """uvicorn's server: after SIGTERM, running requests have ``limits.shutdown_timeout`` seconds to finish.

    With ``abandon``, exits the process if its threads outlive its requests by some time.
    """

    def __init__(self, app: FastAPI, limits: Limits, abandon: bool = False) -> None:
        self._grace, self._abandon = limits.shutdown_timeout, abandon
        config = uvicorn.Config(
            app,
            lifespan="on",
            limit_concurrency=limits.requests + _IDLE_CONNECTIONS,
            timeout_graceful_shutdown=self._grace,
            **_OPTIONS,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._abandon:
            status = 130 if signal.SIGINT in self._captured_signals else 0
            last = Timer(self._grace + _THREADS, os._exit, [status])
            last.daemon = True
            last.start()
        await super().shutdown(sockets)


def run(app: FastAPI, limits: Limits, listening: socket.socket, engine: Engine) -> NoReturn:
    """Serve until SIGTERM or SIGINT; running requests then have ``limits.shutdown_timeout`` seconds to finish.

    SIGTERM closes the engine and exits the process directly: the interpreter's finalization takes seconds. Raises
    ``KeyboardInterrupt``: after SIGINT.
    """
    log_to_stderr(limits.log_level)
    # uvicorn raises the signal again after shutdown, which would change the exit status.
    with on_signals(lambda *_: None, signal.SIGTERM):
        Server(app, limits, abandon=True).run(sockets=[listening])
    engine.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
