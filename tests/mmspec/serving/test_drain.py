"""Middleware of Ray's proxy, without Ray: responses pass, and those that break off end with an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mmspec.serving.middleware import LostReplica

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
        [start(STREAM, 400), body(b"no")],
        [start([]), body(b"")],
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


@pytest.mark.parametrize("sent", [[], [body(b"data: 1\n\n", True)], [body(b"", True), body(b"data: 1\n\n", True)]])
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
    for kind in ("lifespan", "websocket"):
        assert through([], kind) == []
