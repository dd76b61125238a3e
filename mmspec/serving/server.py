"""Runs the application with uvicorn: socket, signals, shutdown."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from mmspec.errors import UserError
from mmspec.serving.limits import Limits

GRACE = 3
"""Seconds that running requests have to end after SIGTERM; then they are cancelled."""

_SPARE_CONNECTIONS = 64  # for requests that are read, refused, or ask for figures


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


def uvicorn_server(app: FastAPI, limits: Limits) -> uvicorn.Server:
    """A server for sockets of ``listen``; connections beyond those that may run or wait get status 503."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            limit_concurrency=limits.max_running + limits.max_waiting + _SPARE_CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        )
    )


def run(app: FastAPI, limits: Limits, listening: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; running requests have ``GRACE`` seconds to end.

    Raises:
        KeyboardInterrupt: after SIGINT.
    """
    with _sigterm_returns():
        uvicorn_server(app, limits).run(sockets=[listening])


@contextmanager
def _sigterm_returns() -> Iterator[None]:
    """After its shutdown uvicorn raises the signal again, which would end the process with another exit status."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
