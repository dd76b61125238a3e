"""Answers of a server that accepts no requests: while its model loads, and while it stops."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.serving.errors import APIError, as_events

LIVE = "/livez"
"""Path of the liveness probe, which has status 200 as long as the process answers."""

READY = ("/health", "/readyz")
"""Paths of the readiness probe, which has status 200 while requests are accepted."""


class Unready:
    """An application that accepts no requests: status 503 with ``Retry-After``, and 200 for the liveness probe.

    Args:
        why: completes "the server is".
    """

    def __init__(self, why: str) -> None:
        self.error = APIError(503, f"the server is {why}: try again later", headers={"Retry-After": "1"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            response = Response() if scope["path"] == LIVE else self.error.response()
            await response(scope, receive, send)


class Drain:
    """State of a server that may be about to stop. Used from one event loop only.

    Attributes:
        closing: new requests are refused.
    """

    def __init__(self) -> None:
        self.closing = False
        self._loop: asyncio.AbstractEventLoop | None = None  # of the requests
        self.tasks: set[asyncio.Task[None]] = set()

    async def close(self, seconds: float) -> None:
        """Refuse new requests, and wait for those that run; cancel them after some seconds."""
        self.closing = True
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=seconds)
        if tasks := set(self.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1)
            await asyncio.sleep(0.05)  # their responses

    def close_from_thread(self, seconds: float) -> None:
        """``close`` from another thread than the event loop's."""
        self.closing = True
        if self._loop is not None and self._loop.is_running():
            closed = asyncio.run_coroutine_threadsafe(self.close(seconds), self._loop)
            with suppress(TimeoutError):
                closed.result(seconds + 2)

    def add(self, task: asyncio.Task[None]) -> None:
        """A request has begun."""
        self._loop = asyncio.get_running_loop()
        self.tasks.add(task)


class Drained:
    """Refuses requests to a server that stops, and completes the responses of those that it cancels."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app, self._drain, self._stopping = app, drain, Unready("stopping")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._drain.closing:
            await self._stopping(scope, receive, send)
            return
        started = stream = ended = False

        async def watch(message: Message) -> None:
            nonlocal started, stream, ended
            await send(message)
            if message["type"] == "http.response.start":
                started = True
                stream = any(b"event-stream" in value for name, value in message["headers"] if name == b"content-type")
            else:
                ended = not message.get("more_body", False)

        task = asyncio.ensure_future(self.app(scope, receive, watch))
        self._drain.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._drain.tasks.discard(task)
            if not task.done():  # this request itself is cancelled
                task.cancel()
        if not task.cancelled():
            task.result()
        elif not started:
            with suppress(OSError):
                await self._stopping.error.response()(scope, receive, send)
        elif stream and not ended:
            await send({"type": "http.response.body", "body": as_events(self._stopping.error)})
