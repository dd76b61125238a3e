"""Answers of a server that accepts no requests: while its model loads, while it stops, and where it was lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.serving.errors import APIError, as_events

LIVE = "/livez"
"""Path of the liveness probe, which has status 200 as long as the process answers."""

READY = ("/health", "/readyz")
"""Paths of the readiness probe, which has status 200 while requests are accepted."""

PROBES = (LIVE, *READY)


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


class Watched:
    """Sends the messages of a response, and completes one that its application leaves incomplete.

    Args:
        send: of the connection.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = self._stream = self._ended = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._started = True
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._stream = any(b"event-stream" in kind for kind in kinds)
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)

    async def complete(self, error: APIError, scope: Scope, receive: Receive) -> None:
        """End the response with an error: as the whole response, or as the last event of a stream."""
        if not self._started:
            await error.response()(scope, receive, self._send)
        elif self._stream and not self._ended:
            await self._send({"type": "http.response.body", "body": as_events(error)})


class Drained:
    """Refuses requests to a server that stops or has too many, and completes the responses of those that it cancels.

    Probes are always answered.

    Args:
        most: requests at a time.
    """

    def __init__(self, app: ASGIApp, drain: Drain, most: int) -> None:
        self.app, self._drain, self._stopping = app, drain, Unready("stopping")
        self._most, self._busy = most, Unready(f"answering {most} requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._drain.closing:
            await self._stopping(scope, receive, send)
            return
        if scope["path"] in PROBES:
            await self.app(scope, receive, send)
            return
        if len(self._drain.tasks) >= self._most:
            await self._busy(scope, receive, send)
            return
        response = Watched(send)
        task = asyncio.ensure_future(self.app(scope, receive, response))
        self._drain.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._drain.tasks.discard(task)
            if not task.done():  # this request itself is cancelled
                task.cancel()
        if not task.cancelled():
            task.result()
            return
        with suppress(OSError):
            await response.complete(self._stopping.error, scope, receive)


class LostReplica:
    """Completes responses that Ray's HTTP proxy leaves incomplete: it returns without a word when a replica dies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Watched(send)
        await self.app(scope, receive, response)
        if scope["type"] == "http":
            error = APIError(503, "the replica that ran the request was lost: try again", headers={"Retry-After": "1"})
            await response.complete(error, scope, receive)


def proxy_middleware() -> list[Middleware]:
    """What Ray's proxy imports: see ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``."""
    return [Middleware(LostReplica)]
