"""Middleware that ends requests when the server stops."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.serving.errors import APIError, as_events


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

    def error(self) -> APIError:
        return APIError(503, "the server is stopping: try again later", headers={"Retry-After": "1"})


class Drained:
    """Refuses requests to a server that stops, and completes the responses of those that it cancels.

    Args:
        app: the application.
        drain: of the server.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._drain.closing:
            await self._drain.error().response()(scope, receive, send)
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
                await self._drain.error().response()(scope, receive, send)
        elif stream and not ended:
            await send({"type": "http.response.body", "body": as_events(self._drain.error())})
