"""The time in which a request must end, and slots of choices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mmspec.pipeline import Pipeline
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits
from mmspec.serving.runner import Deadline, Slots
from tests.testkit.served import LONG, Served, eventually, question, served

pytestmark = pytest.mark.usefixtures("one_thread")

MESSAGE = "a request must end within 5 s (--request-timeout): this one had not"


def test_a_time_of_the_answer(server: Served, slow: Callable[[float], None]) -> None:
    """It is shorter, and is the beginning of the whole one."""
    body = question(**{**LONG, "max_tokens": 60})
    whole = server.post(body).json()["choices"][0]["message"]["content"]
    slow(0.05)
    choice = server.post({**body, "t_max_predict_ms": 300}).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert 0 < len(choice["message"]["content"]) < len(whole)
    assert whole.startswith(choice["message"]["content"])


@pytest.fixture
def brief(pipe: Pipeline, slow: Callable[[float], None]) -> Iterator[Served]:
    """A server whose answers take longer than a request may."""
    slow(0.05)
    with served(pipe, Limits(max_running=1, request_timeout=5)) as running:
        yield running


def test_requests_that_run_and_wait(brief: Served) -> None:
    """A stream that has begun ends with the error, others have its status; nothing is left of them."""
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


def test_errors_of_the_work_are_its_own() -> None:
    async def fail() -> None:
        raise TimeoutError("its own")

    async def scenario() -> None:
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
        ("+a5 +b1 +c1 -a", "b", "c"),  # the queue is full, then its head is cancelled
    ],
)
def test_slots_are_given_in_order(events: str, order: str, refused: str) -> None:
    """Requests of some slots come (+) and end or are cancelled (-); there are 4 slots, and at most 6 may wait."""
    granted: list[str] = []
    denied: list[tuple[str, int, Any]] = []

    async def scenario() -> None:
        slots, tasks = Slots(4, 6), dict[str, asyncio.Task[None]]()

        async def ask(name: str, count: int) -> None:
            try:
                await slots.acquire(count)
            except APIError as error:
                denied.append((name, error.status, error.headers))
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
    assert denied == [(name, 429, {"Retry-After": "1"}) for name in refused]
