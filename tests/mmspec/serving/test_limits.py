"""Limits of requests, exactly at the limit and one beyond it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from mmspec.errors import UserError
from mmspec.serving import app
from mmspec.serving.builder import JobBuilder
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits
from mmspec.serving.media import MediaReader, Medium, _limited
from mmspec.serving.responses import StoredResponses
from mmspec.serving.schemas import ChatRequest, CompletionRequest, parse

LIMITS = Limits(max_body=1)
MOST = 1 << 20


def builder(limits: Limits = LIMITS) -> JobBuilder:
    pipe: Any = SimpleNamespace()
    parts: Any = (SimpleNamespace(), SimpleNamespace())
    return JobBuilder(pipe, limits, ["tiny"], *parts, StoredResponses(1, 1))


def body_of(pieces: Sequence[bytes], headers: Sequence[tuple[bytes, bytes]], wait: float = 0.0) -> bytes:
    """What the endpoints read of a request's body."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(wait)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": list(headers)}, receive)
    return asyncio.run(app.read_body(request, LIMITS.body_bytes))


def pieces(size: int) -> list[bytes]:
    """A body of this size in pieces of 64 KiB and a rest."""
    whole = bytes(size)
    return [whole[at : at + (1 << 16)] for at in range(0, size, 1 << 16)] or [b""]


LENGTHS = {
    "none": lambda size: [],
    "right": lambda size: [(b"content-length", b"%d" % size)],
    "wrong": lambda size: [(b"content-length", b"10")],
    "chunked": lambda size: [(b"transfer-encoding", b"chunked")],
    "both": lambda size: [(b"content-length", b"10"), (b"transfer-encoding", b"chunked")],
    "no number": lambda size: [(b"content-length", "²".encode("latin-1"))],
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [0, 1, MOST - 1, MOST, MOST + 1, MOST + (1 << 16)])
def test_bodies_have_at_most_the_limit_whatever_they_say_of_their_length(size: int, length: str) -> None:
    headers = LENGTHS[length](size)
    if size <= MOST:
        assert body_of(pieces(size), headers) == bytes(size)
        return
    with pytest.raises(APIError, match=f"a request's body must have at most {MOST} bytes: got more") as caught:
        body_of(pieces(size), headers)
    assert caught.value.status == 413


@pytest.mark.parametrize(("length", "status"), [(MOST, None), (MOST + 1, 413)])
def test_a_body_that_says_to_be_too_large_is_not_read(length: int, status: int | None) -> None:
    headers = [(b"content-length", b"%d" % length)]
    if status is None:
        assert body_of([b"x"], headers) == b"x"
    else:
        with pytest.raises(APIError):
            body_of([], headers)  # receiving would raise IndexError


def test_a_body_must_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.BODY_SECONDS == 60
    assert body_of([b"a", b"b"], []) == b"ab"
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
    with pytest.raises(APIError, match=r"a request's body must arrive within 0\.05 s") as caught:
        body_of([b"a", b"b", b"c"], [], wait=0.03)
    assert caught.value.status == 408


@pytest.mark.parametrize(("lengths", "fits"), [([500_000], True), ([499_999, 1], True), ([500_000, 1], False)])
def test_characters_of_all_prompts_together(lengths: list[int], fits: bool) -> None:
    texts = ["x" * length for length in lengths]
    if fits:
        builder(Limits())._check_characters(texts, "prompt")
    else:
        with pytest.raises(APIError, match="prompts must have at most 500000 characters: got 500001"):
            builder(Limits())._check_characters(texts, "prompt")


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
    asked = parse(ChatRequest, json.dumps({"model": "tiny", "messages": [message]}).encode())
    with pytest.raises(APIError, match=r"at most 99 characters: got 1\d\d"):
        builder(Limits(max_characters=99))._conversation(asked.messages, [])


class Reader(MediaReader):
    """Reads any file as an image or frames of a given size."""

    def __init__(self, limits: Limits, size: tuple[int, int] = (1, 1)) -> None:
        picture = SimpleNamespace(size=size)
        self.asked: list[dict[str, Any]] = []

        def load(content: bytes, kind: str, **options: Any) -> Any:
            self.asked.append({"content": content, "kind": kind, **options})
            return picture if kind == "image" else SimpleNamespace(frames=[picture])

        decoder = SimpleNamespace(load=load, close=lambda: None)
        io: Any = SimpleNamespace(media_decoder=lambda **given: self.asked.append(given) or decoder)
        super().__init__(io, limits)


KINDS: list[Any] = ["image", "video"]
DATA = "data:x/y;base64," + base64.b64encode(b"content").decode()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_number_of_files(kind: Any, most: int) -> None:
    limits = Limits(**{"max_images": 9, "max_videos": 9, f"max_{kind}s": most})
    reader = Reader(limits)
    other: Any = "video" if kind == "image" else "image"
    media = [Medium(other, DATA, "other"), *(Medium(kind, DATA, f"p{i}") for i in range(most))]
    reader.check(media)
    with pytest.raises(APIError, match=f"a request may have at most {most} {kind}s: got {most + 1}") as caught:
        reader.check([*media, Medium(kind, DATA, "last")])
    assert caught.value.param == "last"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "fits"), [((1000, 10), True), ((10_000, 1), True), ((73, 137), False)])
def test_pixels_of_an_image_or_frame(kind: Any, size: tuple[int, int], fits: bool) -> None:
    """At most 10000."""
    reader = Reader(Limits(max_pixels=10_000), size)
    medium = Medium(kind, DATA, "param")
    if fits:
        found = asyncio.run(reader.read([medium]))
        assert [len(found["images"]), len(found["videos"])] == [kind == "image", kind == "video"]
    else:
        with pytest.raises(APIError, match="param: expected at most 10000 pixels, received 73x137"):
            asyncio.run(reader.read([medium]))
    reader.close()


def test_limits_reach_the_decoder() -> None:
    """20 s and 2 GiB per file; frames and duration of videos."""
    reader = Reader(Limits(frames=3, max_video_seconds=7))
    asyncio.run(reader.read([Medium("image", DATA, "a"), Medium("video", DATA, "b")]))
    reader.close()
    assert reader.asked == [
        {"seconds": 20, "memory": 2 << 30},
        {"content": b"content", "kind": "image", "name": "a"},
        {"content": b"content", "kind": "video", "name": "b", "frames": 3, "max_duration": 7},
    ]


@pytest.mark.parametrize(("sizes", "fits"), [([99], True), ([60, 40], True), ([100], True), ([100, 1], False)])
def test_a_downloaded_file_has_at_most_its_limit(sizes: list[int], fits: bool) -> None:
    chunks = [bytes(size) for size in sizes]
    if fits:
        assert _limited(chunks, 100, float("inf")) == bytes(sum(sizes))
    else:
        with pytest.raises(UserError, match="a downloaded file must have at most 100 bytes: received more"):
            _limited(chunks, 100, float("inf"))


MESSAGE = {"role": "user", "content": "Hello."}


@pytest.mark.parametrize(
    ("kind", "field", "at", "beyond"),
    [
        (ChatRequest, "messages", [MESSAGE] * 1024, [MESSAGE] * 1025),
        (ChatRequest, "messages", [MESSAGE], []),
        (ChatRequest, "stop", ["x" * 512] * 16, ["x"] * 17),
        (ChatRequest, "stop", "x" * 512, ["x" * 513]),
        (ChatRequest, "max_tokens", 1, 0),
        (ChatRequest, "max_tokens", 1 << 31, (1 << 31) + 1),
        (ChatRequest, "max_completion_tokens", 1 << 31, (1 << 31) + 1),
        (ChatRequest, "n", 8, 9),
        (ChatRequest, "n", 1, 0),
        (ChatRequest, "seed", (1 << 64) - 1, 1 << 64),
        (ChatRequest, "top_logprobs", 20, 21),
        (ChatRequest, "top_logprobs", 0, -1),
        (CompletionRequest, "prompt", ["x"] * 1024, ["x"] * 1025),
        (CompletionRequest, "prompt", ["x"], []),
        (CompletionRequest, "logprobs", 20, 21),
        (CompletionRequest, "n", 8, 9),
        (CompletionRequest, "max_tokens", 1 << 31, (1 << 31) + 1),
    ],
)
def test_fields_at_their_limits(kind: Any, field: str, at: Any, beyond: Any) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": [MESSAGE], "logprobs": True}
    if kind is CompletionRequest:
        given = {"model": "tiny", "prompt": "x"}

    def params(value: Any) -> None:
        parse(kind, json.dumps({**given, field: value}).encode()).sampling(Limits(), {})

    params(at)
    with pytest.raises(APIError) as caught:
        params(beyond)
    assert caught.value.status == 400
