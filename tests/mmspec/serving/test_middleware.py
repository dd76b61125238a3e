"""Middleware by itself: hosts, origins and keys of requests, their number, and responses that break off."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mmspec.serving.limits import host_names, server_url
from mmspec.serving.middleware import AccessGuard, Drain, Drained, LostReplica, RequestLog

HOSTS = {"localhost", "127.0.0.1", "[::1]"}
ORIGINS = ["http://app.example"]


def status(headers: dict[str, str], path: str = "/v1/models", kind: str = "http", **options: Any) -> int:
    """That of the response; 200 of the application."""
    found: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def send(message: Any) -> None:
        found.append(message)

    given = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "headers": given}
    guard = AccessGuard(application, **{"hosts": HOSTS, "origins": ORIGINS, "api_key": None, **options})
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return found[0]["status"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("LOCALHOST:80", 200),
        ("127.0.0.1", 200),
        ("[::1]", 200),
        ("[::1]:8000", 200),
        ("[::2]:8000", 403),
        ("localhost.evil.example", 403),
        ("evil.example:80", 403),
        ("", 403),
    ],
)
def test_names_of_the_server(host: str, expected: int) -> None:
    assert status({"Host": host}) == expected
    assert status({"Host": host}, hosts=None) == 200
    assert status({}, hosts=None) == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://app.example", 200),
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("http://localhost", 403),
        ("http://localhost:8001", 403),
        ("http://app.example.evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_origins_of_pages(origin: str, expected: int) -> None:
    assert status({"Host": "localhost:8000", "Origin": origin}) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Bearer secret", 200),
        ("BEARER  secret ", 200),
        ("Bearer secre", 401),
        ("Bearer secrets", 401),
        ("Bearer Secret", 401),
        ("Bearer", 401),
        ("Basic secret", 401),
        ("Bearer s\xe9cret", 401),
        (None, 401),
    ],
)
def test_keys(given: str | None, expected: int) -> None:
    headers = {"Host": "localhost"} if given is None else {"Host": "localhost", "Authorization": given}
    for path in ("/v1/models", "/metrics", "/health/x"):
        assert status(headers, path, api_key="secret") == expected
    assert status(headers, "/health", api_key="secret") == 200
    assert status(headers) == 200


def test_other_connections_pass() -> None:
    assert status({}, kind="lifespan", api_key="secret") == 200


@pytest.mark.parametrize(
    ("host", "address", "known"),
    [
        ("127.0.0.1", "http://127.0.0.1:80", HOSTS),
        ("localhost", "http://localhost:80", HOSTS),
        ("::1", "http://[::1]:80", HOSTS | {"::1"}),
        ("[::1]", "http://[::1]:80", HOSTS),
        ("127.0.0.2", "http://127.0.0.2:80", HOSTS | {"127.0.0.2"}),
        ("0.0.0.0", "http://0.0.0.0:80", None),
        ("::", "http://[::]:80", None),
        ("server.example", "http://server.example:80", None),
    ],
)
def test_addresses_and_names_of_a_server(host: str, address: str, known: set[str] | None) -> None:
    assert (server_url(host, 80), host_names(host)) == (address, known)


STREAM = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


def start(headers: Any, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(content: bytes, more: bool | None = None) -> dict[str, Any]:
    rest = {} if more is None else {"more_body": more}
    return {"type": "http.response.body", "body": content, **rest}


def through(messages: list[dict[str, Any]], kind: str = "http") -> list[dict[str, Any]]:
    """What a client receives if the proxy sends these messages and returns."""
    received: list[dict[str, Any]] = []

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async def send(message: Any) -> None:
        received.append(message)

    asyncio.run(LostReplica(proxy)({"type": kind, "headers": []}, None, send))  # type: ignore[arg-type]
    return received


@pytest.mark.parametrize(
    "messages",
    [
        [start(JSON), body(b"{}")],
        [start(JSON), body(b"{", True), body(b"}", False)],
        [start(STREAM), body(b"data: 1\n\n", True), body(b"", False)],
        [start(JSON), body(b"{", True)],  # a length was stated: nothing can be added
        [start(JSON)],
    ],
)
def test_responses_pass_as_they_are(messages: list[dict[str, Any]]) -> None:
    assert through(messages) == messages


def test_a_request_without_a_response_gets_an_error() -> None:
    begin, end = through([])
    headers = dict(begin["headers"])
    assert (begin["status"], headers[b"retry-after"], headers[b"content-type"]) == (503, b"1", b"application/json")
    error = json.loads(end["body"])["error"]
    assert error["message"] == "the replica that ran the request was lost: try again"
    assert error["type"] == "server_error"


@pytest.mark.parametrize("sent", [[], [body(b"", True), body(b"data: 1\n\n", True)]])
@pytest.mark.parametrize("name", [b"content-type", b"Content-Type"])
def test_a_stream_that_breaks_off_ends_with_an_error(sent: list[dict[str, Any]], name: bytes) -> None:
    given = [start([(b"x", b"event-stream"), (name, b"text/event-stream")]), *sent]
    *before, last = through(given)
    assert before == given
    event, done, rest = last["body"].decode().split("\n\n")
    assert "was lost" in json.loads(event.removeprefix("data: "))["error"]["message"]
    assert (done, rest) == ("data: [DONE]", "")
    assert not last.get("more_body", False)


def test_other_connections_get_nothing() -> None:
    assert through([], "lifespan") == []


def test_a_request_that_is_cancelled_leaves_room_for_the_next() -> None:
    """As Ray cancels requests whose clients have gone."""
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        try:
            if scope["path"] == "/long":
                await asyncio.Event().wait()
            await send(start(JSON))
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def send(message: Any) -> None:
        seen.extend([message["status"]] if "status" in message else [])

    async def scenario() -> None:
        drained = RequestLog(Drained(application, Drain(), most=1))
        requests = [{"type": "http", "method": "GET", "path": path, "headers": []} for path in ("/long", "/next")]
        first = asyncio.ensure_future(drained(requests[0], None, send))  # type: ignore[arg-type]
        while not seen:
            await asyncio.sleep(0)
        await drained(requests[1], None, send)  # type: ignore[arg-type]
        first.cancel()
        await asyncio.wait([first])
        await drained(requests[1], None, send)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert seen == ["/long", 503, "cancelled", "/next", 200]
