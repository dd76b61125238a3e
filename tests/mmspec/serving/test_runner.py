"""Limits of requests, exactly at the limit and one beyond it; the time of a request; slots of choices."""

import asyncio
import base64
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from starlette.requests import Request

from mmspec.serving import app
from mmspec.serving.errors import APIError
from mmspec.serving.media import MediaReader, Medium
from mmspec.serving.middleware import RequestQueue
from mmspec.serving.responses import StoredResponses
from mmspec.serving.runner import Deadline, JobBuilder
from mmspec.serving.schemas import ChatCompletionRequest, parse
from mmspec.serving.settings import Limits
from tests.testkit.served import LONG, eventually, question, served

pytestmark = pytest.mark.usefixtures("one_thread")


MESSAGE = "a request must end within 5 s (--request-timeout): this one had not"
LIMITS = Limits(max_body=1)
MOST = 1 << 20
_LONG = "x" * 100
_CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}


def test_a_time_of_the_answer(server, slow):
    body = question(**{**LONG, "max_tokens": 60})
    whole = server.post(body).json()["choices"][0]["message"]["content"]
    slow(0.05)
    choice = server.post({**body, "t_max_predict_ms": 300}).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert 0 < len(choice["message"]["content"]) < len(whole)
    assert whole.startswith(choice["message"]["content"])


@pytest.fixture
def brief(pipe, slow):
    slow(0.05)
    with served(pipe, Limits(max_running=1, request_timeout=5)) as running:
        yield running


def test_requests_that_run_and_wait(brief):
    with ThreadPoolExecutor(2) as threads:
        stream = threads.submit(brief.post, question(stream=True, **LONG))
        assert eventually(lambda: brief.app.state.slots.running == 1)
        late = brief.post(question(**LONG))
        assert (late.status_code, late.json()["error"]["message"]) == (504, MESSAGE)
        assert late.headers["x-should-retry"] == "false"  # openai-python would send it again
        *chunks, error, done = stream.result().text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"] == late.json()["error"]
    assert any(json.loads(chunk[6:])["choices"][0]["delta"]["content"] for chunk in chunks)
    assert eventually(lambda: brief.idle)
    assert brief.post(question(max_tokens=2)).status_code == 200


def test_errors_of_the_work_are_its_own():
    async def fail():
        raise TimeoutError("its own")

    async def scenario():
        with pytest.raises(TimeoutError, match="its own"):
            await Deadline(9).wait(fail())
        with pytest.raises(APIError, match="must end within"):
            await Deadline(0.01).wait(asyncio.sleep(9))
        await Deadline(0).wait(asyncio.sleep(0))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("events", "order", "refused"),
    [
        ("+a3 +b1 +c2 -a", "abc", ""),  # c waits for a
        ("+a3 +b2 +c1 -a", "abc", ""),  # c would fit, but b comes first
        ("+a4 +b3 +c2 +d1 -b -a", "acd", ""),  # b is cancelled while it waits
        ("+a4 +b3 +c1 -a -b", "abc", ""),
        ("+a4 +b3 +c3 +d1 -b +e1 -a", "ace", "d"),
    ],
)
def test_slots_are_given_in_order(events, order, refused):
    """Requests of some slots come (+) and end or are cancelled (-); there are 4 slots, and at most 6 may wait."""
    granted = []
    denied = []

    async def scenario():
        slots, tasks = RequestQueue(4, 6), dict[str, asyncio.Task[None]]()

        async def ask(name, count):
            try:
                await slots.acquire(count)
            except APIError as error:
                denied.append((name, error.status, error.code, error.headers))
                return
            granted.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                slots.release(count)

        for event in events.split():
            if event[0] == "+":
                tasks[event[1]] = asyncio.ensure_future(ask(event[1], int(event[2:])))
            else:
                tasks[event[1]].cancel()
            for _ in range(9):
                await asyncio.sleep(0)
            assert slots.running <= 4
            assert slots.waiting <= 6
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert (slots.running, slots.waiting) == (0, 0)

    asyncio.run(scenario())
    assert "".join(granted) == order
    assert denied == [(name, 429, "rate_limit_exceeded", {"Retry-After": "1"}) for name in refused]


def read(pieces, length):
    """Read a request's body as the endpoints do."""

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    headers = [] if length is None else [(b"content-length", length)]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    return asyncio.run(app.read_body(request, LIMITS.body_bytes))


@pytest.mark.parametrize("length", [None, b"10", b"%d" % MOST, "²".encode("latin-1")])
def test_bodies_have_at_most_the_limit_whatever_they_say_of_their_length(length):
    assert read([b""], length) == b""
    assert read([bytes(MOST - 1), b"1"], length) == bytes(MOST - 1) + b"1"
    with pytest.raises(APIError, match=f"a request's body must have at most {MOST} bytes: got more") as caught:
        read([bytes(MOST), b"1", b""], length)
    assert caught.value.status == 413


def test_a_body_that_says_to_be_too_large_is_not_read():
    with pytest.raises(APIError):
        read([], b"%d" % (MOST + 1))  # receiving would raise IndexError


@pytest.mark.parametrize(("error", "raised"), [(ConnectionResetError, ()), (ValueError, ValueError), (None, ())])
def test_a_stream_that_ends_early_closes_its_events(error, raised):
    seen = []

    async def receive():
        await asyncio.sleep(9 if error else 0.01)
        return {"type": "http.disconnect"}

    async def events():
        try:
            yield b"data"
            await asyncio.sleep(9)
        finally:
            seen.append("closed")

    async def scenario():
        stream = app.EventStream(events())
        with pytest.raises(raised) if raised else nullcontext():
            await stream({"type": "http"}, receive, AsyncMock(side_effect=[None, error]))
        return seen.copy()

    assert asyncio.run(scenario()) == ["closed"]


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
def test_all_texts_of_a_message_count(message):
    asked = parse(ChatCompletionRequest, json.dumps({"model": "tiny", "messages": [message]}).encode())
    pipe, limits = SimpleNamespace(adapters=()), Limits(max_characters=99)
    builder = JobBuilder(pipe, limits, ["tiny"], SimpleNamespace(), SimpleNamespace(), StoredResponses(1, 1))
    with pytest.raises(APIError, match=r"at most 99 characters: got 1\d\d"):
        builder.chat(asked)


def test_limits_reach_the_decoder():
    """20 s and 2 GiB per file; frames and duration of videos."""
    asked = []
    picture = SimpleNamespace(size=(1, 1), frames=[SimpleNamespace(size=(1, 1))])
    decoder = SimpleNamespace(load=lambda *_, **given: asked.append(given) or picture, close=lambda: None)
    io = SimpleNamespace(media_decoder=lambda **given: asked.append(given) or decoder)
    reader = MediaReader(io, Limits(frames=3, max_video_seconds=7))
    data = "data:x/y;base64," + base64.b64encode(b"content").decode()
    asyncio.run(reader.read([Medium("image", data, "a"), Medium("video", data, "b")]))
    reader.close()
    limits = {"frames": 3, "max_duration": 7}
    assert asked == [{"seconds": 20, "memory": 2 << 30}, {"name": "a"}, {"name": "b", **limits}]
