"""Limits of requests, exactly at the limit and one beyond it."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from mmspec.serving import app
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits
from mmspec.serving.media import MediaReader, Medium
from mmspec.serving.responses import StoredResponses
from mmspec.serving.runner import JobBuilder
from mmspec.serving.schemas import ChatCompletionRequest, parse

LIMITS = Limits(max_body=1)
MOST = 1 << 20


def builder(limits: Limits = LIMITS) -> JobBuilder:
    pipe: Any = SimpleNamespace(adapters=())
    parts: Any = (SimpleNamespace(), SimpleNamespace())
    return JobBuilder(pipe, limits, ["tiny"], *parts, StoredResponses(1, 1))


def read(pieces: list[bytes], length: bytes | None) -> bytes:
    """Read a request's body as the endpoints do."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    headers = [] if length is None else [(b"content-length", length)]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    return asyncio.run(app.read_body(request, LIMITS.body_bytes))


@pytest.mark.parametrize("length", [None, b"10", b"%d" % MOST, "²".encode("latin-1")])
def test_bodies_have_at_most_the_limit_whatever_they_say_of_their_length(length: bytes | None) -> None:
    assert read([b""], length) == b""
    assert read([bytes(MOST - 1), b"1"], length) == bytes(MOST - 1) + b"1"
    with pytest.raises(APIError, match=f"a request's body must have at most {MOST} bytes: got more") as caught:
        read([bytes(MOST), b"1", b""], length)
    assert caught.value.status == 413


def test_a_body_that_says_to_be_too_large_is_not_read() -> None:
    with pytest.raises(APIError):
        read([], b"%d" % (MOST + 1))  # receiving would raise IndexError


_LONG = "x" * 100
_CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": _LONG},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": _LONG}]},
        {"role": "assistant", "refusal": _LONG},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": _LONG}]},
        {"role": "assistant", "tool_calls": [_CALL, {**_CALL, "id": _LONG}]},
        {"role": "assistant", "tool_calls": [_CALL, {**_CALL, "function": {"name": _LONG, "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f", "arguments": f'{{"{_LONG}": 1}}'}}]},
        {"role": "tool", "tool_call_id": _LONG, "content": ""},
        {"role": "tool", "tool_call_id": "a", "name": _LONG, "content": ""},
    ],
)
def test_all_texts_of_a_message_count(message: dict[str, Any]) -> None:
    asked = parse(ChatCompletionRequest, json.dumps({"model": "tiny", "messages": [message]}).encode())
    with pytest.raises(APIError, match=r"at most 99 characters: got 1\d\d"):
        builder(Limits(max_characters=99)).chat(asked)


def test_limits_reach_the_decoder() -> None:
    """20 s and 2 GiB per file; frames and duration of videos."""
    asked: list[dict[str, Any]] = []
    picture = SimpleNamespace(size=(1, 1), frames=[SimpleNamespace(size=(1, 1))])
    decoder = SimpleNamespace(load=lambda *_, **given: asked.append(given) or picture, close=lambda: None)
    io: Any = SimpleNamespace(media_decoder=lambda **given: asked.append(given) or decoder)
    reader = MediaReader(io, Limits(frames=3, max_video_seconds=7))
    data = "data:x/y;base64," + base64.b64encode(b"content").decode()
    asyncio.run(reader.read([Medium("image", data, "a"), Medium("video", data, "b")]))
    reader.close()
    limits = {"frames": 3, "max_duration": 7}
    assert asked == [{"seconds": 20, "memory": 2 << 30}, {"name": "a"}, {"name": "b", **limits}]
