"""Middleware by itself: hosts, origins and keys of requests, their number, and responses that break off."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mmspec.serving.limits import host_names, server_url
from mmspec.serving.middleware import AccessGuard, LostReplica, RequestLimit, RequestLog

HOSTS = {"localhost", "127.0.0.1", "[::1]"}
HERE = {"Host": "localhost:8000"}


def status(headers: dict[str, str], path: str, kind: str = "http", **options: Any) -> int:
    """Status of the response; the application has status 200."""
    found: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def send(message: Any) -> None:
        found.append(message)

    given = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "headers": given}
    guard = AccessGuard(application, **{"hosts": HOSTS, "origins": ["http://app.example"], "api_key": None, **options})
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return found[0]["status"]


ACCESS: dict[int, list[dict[str, str]]] = {
    200: [
        *({"Host": host} for host in ("LOCALHOST:80", "127.0.0.1", "[::1]", "[::1]:8000")),
        *({**HERE, "Origin": o} for o in ("http://app.example", "http://localhost:8000", "https://localhost:8000")),
        *({**HERE, "Authorization": given} for given in ("Bearer secret", "BEARER  secret ")),
    ],
    403: [
        *({"Host": host} for host in ("[::2]:8000", "localhost.evil.example", "evil.example:80", "")),
        *({**HERE, "Origin": o} for o in ("http://localhost", "http://localhost:8001", "null", "")),
        {**HERE, "Origin": "http://app.example.evil.example"},
    ],
    401: [
        HERE,
        *({**HERE, "Authorization": f"Bearer {key}"} for key in ("secre", "secrets", "Secret", "", "s\xe9cret")),
        {**HERE, "Authorization": "Basic secret"},
    ],
}


@pytest.mark.parametrize(("expected", "headers"), [(code, one) for code, rows in ACCESS.items() for one in rows])
def test_access(expected: int, headers: dict[str, str]) -> None:
    """Probes need no key; None as hosts accepts all hosts."""
    key = None if expected == 403 or ("Authorization" not in headers and expected == 200) else "secret"
    for path in ("/v1/models", "/metrics", "/health/x"):
        assert status(headers, path, api_key=key) == expected
    assert status(headers, "/health", api_key=key) == (200 if expected == 401 else expected)
    if "Origin" not in headers:
        assert status(headers, "/v1/models", hosts=None) == 200
    assert status({}, "/v1/models", kind="lifespan", api_key="secret") == 200


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
    """Messages that a client receives if the proxy sends these messages and returns."""
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
    """As Ray cancels requests whose clients have gone; a cancelled request gets an error."""
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        if scope["path"] == "/long":
            await asyncio.Event().wait()
        await send(start(JSON))

    async def send(message: Any) -> None:
        seen.extend([message["status"]] if "status" in message else [])

    async def scenario() -> None:
        limited: Any = RequestLog(RequestLimit(application, set(), most=1))
        requests = [{"type": "http", "method": "GET", "path": path, "headers": []} for path in ("/long", "/next")]
        first = asyncio.ensure_future(limited(requests[0], None, send))
        while not seen:
            await asyncio.sleep(0)
        await limited(requests[1], None, send)
        first.cancel()
        await asyncio.wait([first])
        await limited(requests[1], None, send)

    asyncio.run(scenario())
    assert seen == ["/long", 503, 503, "/next", 200]
