"""Middleware: request log, access checks (host, origin, API key), limit on requests, and responses while the server
loads, shuts down or has crashed."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import RLock
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.errors import UserError, first_line
from mmspec.serving.errors import APIError, as_api_error

if TYPE_CHECKING:
    from mmspec.serving.formats import WireFormat

LIVE = "/livez"
"""Path of the liveness probe, which has status 200 while the process answers."""

READY = ("/health", "/readyz")
"""Paths of the readiness probe, which has status 200 while requests are accepted."""

PROBES = (LIVE, *READY)
CLIENT_GONE = 499  # nginx's status, for the log only
LOG = "mmspec.log"
"""Key of a request's ``Watched`` in its scope."""

_log = logging.getLogger("mmspec.serving")
_PORT = re.compile(r":\d*$")  # of a Host header
_POLL = 0.5  # seconds between cancellation checks of queued requests

T = TypeVar("T")


class Unready:
    """An application that rejects requests with status 503 and ``Retry-After``; the liveness probe has status 200."""

    def __init__(self, why: str) -> None:
        self.error = APIError(503, f"the server is {why}: try again later", headers={"Retry-After": "1"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            response = Response() if scope["path"] == LIVE else self.error.response(scope["path"])
            await response(scope, receive, send)


class Watched:
    """ASGI ``send`` that watches a response, and can complete it if the application does not.

    Attributes:
        status: status of the response; None before its start.
        ended: whether the response is sent completely.
        form: response format; None for endpoints without generation, and before the request has been read.
    """

    form: WireFormat | None = None
    error: Exception | None = None

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.ended = self._stream = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._stream = any(b"event-stream" in kind or b"ndjson" in kind for kind in kinds)
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)

    async def complete(self, error: APIError, scope: Scope, receive: Receive) -> None:
        """End the response with an error, sent as the whole response or as the last event of a stream."""
        if self.status is None:
            await error.response(scope["path"])(scope, receive, self._send)
        elif self._stream and not self.ended:
            await self._send({"type": "http.response.body", "body": error.event(scope["path"])})


class RequestLimit:
    """Limits concurrent requests, apart from probes, and completes the responses of requests that the server cancels at
    shutdown. ``running``: their tasks, which it adds and removes."""

    def __init__(self, app: ASGIApp, running: set[asyncio.Task[Any]], most: int) -> None:
        self.app, self._running, self._most = app, running, most
        self._busy = Unready(f"answering {most} requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_counted = scope["type"] == "http" and scope["path"] not in PROBES
        if not is_counted or len(self._running) >= self._most:
            await (self._busy if is_counted else self.app)(scope, receive, send)
            return
        response, task = Watched(send), asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self.app(scope, receive, response)
        except asyncio.CancelledError:
            error = scope[LOG].error = Unready("stopping").error
            with suppress(OSError):
                await response.complete(error, scope, receive)
        finally:
            self._running.discard(task)


class QueuePlace(Future[None]):
    """A request's place in the queue; done when the request may start, alone or with others."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone


class RequestQueue:
    """FIFO queue of requests, which may run together or alone, and of the API's choices. Thread-safe.

    Requests after an exclusive request start when the exclusive request has ended.

    Args:
        size: requests and choices that run at the same time.
        longest: maximum number of further requests, which wait.
    """

    def __init__(self, size: int, longest: int) -> None:
        self._size, self._longest = size, longest
        self._places: list[QueuePlace] = []  # running or waiting
        self._choices: list[QueuePlace] = []  # of the API, running
        self.waiting = 0
        self._lock = RLock()  # re-entrant: garbage collection may end a request in any thread

    def join(self, count: int = 1, *, alone: bool = False) -> list[QueuePlace]:
        """Append ``count`` places to the queue. Raises ``UserError`` if the queue is full."""
        with self._lock:
            if len(self._places) + count > (most := self._size + self._longest):
                raise UserError(f"the server is busy with {most} requests: try again in a minute")
            joined = [QueuePlace(alone) for _ in range(count)]
            self._places += joined
            self._start()
            return joined

    def leave(self, places: Iterable[QueuePlace]) -> None:
        """Remove requests that have ended or stopped waiting."""
        with self._lock:
            for place in places:
                self._places.remove(place)
            self._start()

    def _start(self) -> None:
        places = list(self._places)  # garbage collection below may call ``leave`` in this thread
        for ahead, place in enumerate(places):
            if ahead and (place.alone or ahead >= self._size or places[ahead - 1].alone):
                break
            if not place.done() and place.set_running_or_notify_cancel():
                place.set_result(None)

    def run(self, work: Iterator[T], waiting: Callable[[int], T], *, alone: bool = False) -> Iterator[T]:
        """Run a request's steps, together with other requests or alone; see ``join``. Until it starts, ``waiting`` of
        the number of requests ahead is yielded periodically."""
        joined = self.join(alone=alone)
        try:
            seconds = 0.0  # report the place immediately
            while not wait(joined, seconds).done:
                yield waiting(self._places.index(joined[0]))
                seconds = _POLL
            yield from work
        finally:
            self.leave(joined)

    @property
    def running(self) -> int:
        return len(self._choices)

    async def acquire(self, count: int) -> None:
        """Wait until ``count`` choices may start. Raises ``APIError``: status 429, the queue is full."""
        try:
            joined = self.join(count)
        except UserError as error:
            raise APIError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"}) from None
        self.waiting += count
        try:
            await asyncio.gather(*(asyncio.wrap_future(place) for place in joined if not place.done()))
        except asyncio.CancelledError:
            self.leave(joined)
            raise
        finally:
            self.waiting -= count
        self._choices += joined

    def release(self, count: int = 1) -> None:
        """Remove ended choices. Running choices are interchangeable."""
        self.leave([self._choices.pop() for _ in range(count)])


def log_to_stderr(level: str) -> None:
    log, lines = logging.getLogger("mmspec"), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(lines)
    log.setLevel(level.upper())


class RequestLog:
    """Logs a line of ``key=value`` pairs per request, and answers requests that fail unexpectedly.

    Server errors are logged at level ERROR; their tracebacks, probes and ``/metrics`` at level DEBUG.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, response = clock(), Watched(send)
        try:
            await self.app({**scope, LOG: response}, receive, response)
        except Exception as error:
            response.error = error
            if response.status is None:
                await as_api_error(error).response(scope["path"])(scope, receive, response)
        status, problem, quiet = response.status or 0, response.error, scope["path"] in (*PROBES, "/metrics")
        pairs: dict[str, Any] = {"id": None, "finish": None} if response.form is None else response.form.logged()
        if problem is not None:  # a stream has already sent status 200
            status, pairs["error"] = as_api_error(problem).status, json.dumps(first_line(problem))
        elif response.form is not None and pairs["finish"] is None:  # the client disconnected from a stream
            status = CLIENT_GONE
        if status >= 400:
            pairs["finish"] = "disconnected" if status == CLIENT_GONE else "error"
        pairs |= {"endpoint": f'"{scope["method"]} {quote(scope["path"][:200])}"', "status": status}
        line = " ".join(f"{name}={value}" for name, value in pairs.items() if value is not None)
        level = logging.ERROR if status >= 500 else logging.DEBUG if quiet else logging.INFO
        _log.log(level, "%s total_s=%.3f", line, clock() - began)
        if status >= 500:
            _log.debug("traceback of %s", pairs["id"], exc_info=problem)


class LostReplica:
    """Completes responses when a replica dies: Ray's HTTP proxy then returns silently."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Watched(send)
        await self.app(scope, receive, response)
        if scope["type"] == "http":
            error = APIError(503, "the replica that ran the request was lost: try again", headers={"Retry-After": "1"})
            await response.complete(error, scope, receive)


def proxy_middleware() -> list[Middleware]:
    """Middleware for Ray's proxy, imported through ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``."""
    return [Middleware(LostReplica)]


class AccessGuard:
    """Refuses cross-site browser requests, and requests without the API key.

    The Host header exposes DNS rebinding (a foreign name that resolves to this machine), Origin other cross-site pages.

    Args:
        hosts: accepted names in the Host header, without ports; None accepts all.
        origins: allowed origins such as ``http://localhost:3000``, in addition to the server's own.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str], api_key: str | None
    ) -> None:
        self.app = app
        self._hosts, self._origins = hosts, origins
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self.app if error is None else error.response(scope["path"]))(scope, receive, send)

    def _error(self, path: str, headers: Headers) -> APIError | None:
        host = headers.get("host", "")
        if self._hosts is not None and _PORT.sub("", host).lower() not in self._hosts:
            return APIError(403, f"the host must be one of {', '.join(sorted(self._hosts))}: got {host!r}")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and urlsplit(origin).netloc != host:
            return APIError(403, f"requests of web pages need --allow-origin {origin!r}")
        scheme, _, given = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        if self._key is not None and path not in PROBES:
            same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key)
            if not same or scheme.lower() != "bearer":  # RFC 9110: schemes are case-insensitive
                message = "a valid API key is needed: expected Authorization: Bearer KEY or x-api-key: KEY"
                return APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None
