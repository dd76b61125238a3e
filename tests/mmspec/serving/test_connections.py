"""Clients that send nothing, little by little, or read nothing: their connections are closed, others are answered."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from uvicorn.server import ServerState

import mmspec
from mmspec.pipeline import Pipeline
from mmspec.serving import server
from mmspec.serving.limits import SPARE_REQUESTS, Limits
from mmspec.serving.middleware import Unready
from mmspec.serving.server import Connection
from tests.served import TIMEOUT, Served, eventually, question, served

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
ONE = Limits(max_running=1, max_waiting=0)


def connected(served: Served, receive: int | None = None) -> socket.socket:
    """A connection; with a receive buffer of so many bytes."""
    made = socket.socket()
    made.settimeout(TIMEOUT)
    if receive is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    host, _, port = served.url.removeprefix("http://").partition(":")
    made.connect((host, int(port)))
    return made


@contextmanager
def many(served: Served, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = [stack.enter_context(connected(served)) for _ in range(count)]
        for one in made:
            one.sendall(first)
        yield made


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def accepted(served: Served) -> int:
    """Connections that the server has open: it runs in this process."""
    port = int(served.url.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in found)


@pytest.mark.parametrize("requests", [0, 1])
def test_a_dripping_head_is_closed(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    """Also that of a second request, though each byte ends uvicorn's own time."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    with served(pipe) as running, connected(running) as silent, connected(running) as dripping:
        for _ in range(requests):
            dripping.sendall(HEAD)
            assert dripping.recv(1000).startswith(b"HTTP/1.1 200")
        dripping.settimeout(0.01)

        def closed() -> bool:
            try:
                dripping.sendall(b"G")
                return is_closed(dripping)
            except TimeoutError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                return True

        assert eventually(closed)
        assert is_closed(silent)


def test_silent_connections_hold_nobody_up(pipe: Pipeline) -> None:
    with served(pipe, ONE) as running, many(running, ONE.requests + 10):
        for path in ("/livez", "/health", "/readyz", "/v1/models", "/metrics"):
            assert httpx.get(f"{running.url}{path}", timeout=TIMEOUT).status_code == 200
        assert running.post(question()).status_code == 200


def test_of_too_many_connections_the_longest_silent_one_is_closed(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_CONNECTIONS", 3 - ONE.requests)  # four connections are too many
    body = b'{"model": "tiny-llava", "prompt": "a", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with served(pipe, ONE) as running, connected(running) as asking:
        asking.sendall(head % len(body))  # its body is still to come
        assert eventually(lambda: len(running.app.state.drain.tasks) == 1)
        with connected(running) as first, connected(running) as second:
            for one in (second, first):
                one.sendall(HEAD)
                assert one.recv(1000).startswith(b"HTTP/1.1 200")
            with connected(running) as third:
                assert is_closed(second)
                for one in (third, first):
                    one.sendall(HEAD)
                    assert one.recv(1000).startswith(b"HTTP/1.1 200")
        asking.sendall(body)
        assert asking.recv(1000).startswith(b"HTTP/1.1 200")


def test_requests_are_counted_and_probes_are_not(pipe: Pipeline) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
    with served(pipe, ONE) as running:
        with many(running, ONE.requests, head):
            assert eventually(lambda: len(running.app.state.drain.tasks) == 1 + SPARE_REQUESTS)
            busy = running.post(question())
            assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
            assert busy.json()["error"]["message"] == "the server is answering 65 requests: try again later"
            for path in ("/livez", "/health", "/readyz"):
                assert httpx.get(f"{running.url}{path}", timeout=TIMEOUT).status_code == 200
        assert eventually(lambda: not running.app.state.drain.tasks)
        assert running.post(question()).status_code == 200


def test_without_the_key_nobody_counts(pipe: Pipeline) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
    with served(pipe, ONE, api_key="secret") as running, many(running, ONE.requests + 10, head):
        assert running.post(question(), headers={"Authorization": "Bearer secret"}).status_code == 200


@pytest.fixture
def large(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of 16 MiB, in 64 pieces: more than the system buffers."""

    async def pieces(prompt: Any, **keywords: Any) -> Any:
        for number in range(64):
            ends: dict[str, Any] = {"finish_reason": "length", "stats": mmspec.Stats()} if number == 63 else {}
            yield mmspec.Piece("x" * (1 << 18), [1], **ends)

    monkeypatch.setattr(pipe, "astream", pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_dropped(
    pipe: Pipeline, large: None, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 0.1)
    body = b'{"model": "tiny-llava", "prompt": "a", "stream": %s}' % str(stream).lower().encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with served(pipe) as running, connected(running, receive=4096) as stuck:
        stuck.sendall(head + body)
        assert stuck.recv(10) == b"HTTP/1.1 2"
        assert eventually(lambda: accepted(running) == 0)
        assert eventually(lambda: running.idle and not running.app.state.drain.tasks)


class Clock:
    """A loop whose timers run when the test says so."""

    def __init__(self) -> None:
        self.timers: list[SimpleNamespace] = []

    def call_later(self, delay: float, function: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(delay=delay, run=function)
        timer.cancel = lambda: self.timers.remove(timer) if timer in self.timers else None
        self.timers.append(timer)
        return timer

    def pass_time(self, delay: float) -> None:
        """Run the timers of this delay."""
        for timer in [one for one in self.timers if one.delay == delay]:
            self.timers.remove(timer)
            timer.run()


class Transport:
    """A transport with some bytes that the client has not read."""

    def __init__(self) -> None:
        self.unread, self.state = 0, "open"

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.state != "open"

    def close(self) -> None:
        self.state = "closed"

    def abort(self) -> None:
        self.state = "aborted"


@pytest.fixture
def connection() -> Connection:
    config = uvicorn.Config(Unready("not there"), log_level="warning")
    config.load()
    made = Connection(config, ServerState(), {}, Clock(), most=9)
    made.connection_made(Transport())
    return made


def test_the_time_of_a_head_begins_anew_after_a_response(connection: Connection) -> None:
    connection.cycle = SimpleNamespace(response_complete=False)
    connection.loop.pass_time(server.HEAD_SECONDS)
    assert connection.transport.state == "open"  # it is answered
    connection.cycle.response_complete = True
    connection.on_response_complete()
    connection.loop.pass_time(server.HEAD_SECONDS)
    assert connection.transport.state == "closed"


@pytest.mark.parametrize("begin", ["pause", "head"])
def test_a_client_must_go_on_reading(connection: Connection, begin: str) -> None:
    """While a response is sent, and when its connection is being closed."""
    transport, step = connection.transport, server.READ_BYTES
    transport.unread = 5 * step
    if begin == "pause":
        connection.pause_writing()
    else:
        connection.loop.pass_time(server.HEAD_SECONDS)
    for _ in range(2):
        transport.unread -= step
        connection.loop.pass_time(server.READ_SECONDS)
        assert transport.state != "aborted"
    transport.unread -= step - 1
    connection.loop.pass_time(server.READ_SECONDS)
    assert transport.state == "aborted"


def test_a_client_that_has_caught_up_has_time(connection: Connection) -> None:
    connection.pause_writing()
    connection.resume_writing()
    connection.loop.pass_time(server.READ_SECONDS)
    assert connection.transport.state == "open"
