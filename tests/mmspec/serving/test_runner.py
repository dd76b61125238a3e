"""The time in which a request must end, and slots of choices."""

from __future__ import annotations

import asyncio
import json
import random
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
    pipe.calibrate()  # otherwise the first request does
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


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class PlainSlots:
    """Slots as lists of what holds and waits for them, each as (number of its request, slots)."""

    def __init__(self, size: int, longest: int) -> None:
        self.size, self.longest = size, longest
        self.held: list[tuple[int, int]] = []
        self.queue: list[tuple[int, int]] = []

    def acquire(self, request: int, count: int) -> bool:
        """Whether the request is not refused."""
        fits = not self.queue and count_of(self.held) + count <= self.size
        if not fits and count_of(self.queue) + count > self.longest:
            return False
        self.queue.append((request, count))
        self.grant()
        return True

    def end(self, request: int) -> None:
        """It gives its slots back, or waits no longer."""
        self.held = [one for one in self.held if one[0] != request]
        self.queue = [one for one in self.queue if one[0] != request]
        self.grant()

    def grant(self) -> None:
        while self.queue and count_of(self.held) + self.queue[0][1] <= self.size:
            self.held.append(self.queue.pop(0))


def count_of(entries: list[tuple[int, int]]) -> int:
    return sum(count for _, count in entries)


@pytest.mark.parametrize("longest", [0, 6])
def test_slots_are_given_in_order(longest: int) -> None:
    """Requests come and are cancelled in random order, several in one turn of the loop, too."""

    async def scenario(seed: int) -> None:
        chance, slots, plain = random.Random(seed), Slots(4, longest), PlainSlots(4, longest)
        tasks: dict[int, asyncio.Task[None]] = {}
        granted: list[int] = []
        refused: list[Any] = []

        async def ask(request: int, count: int) -> None:
            try:
                await slots.acquire(count)
            except APIError as error:
                refused.append((request, error.status, error.headers))
                return
            granted.append(request)
            try:
                await asyncio.Event().wait()
            finally:
                slots.release(count)

        expected: list[Any] = []
        for request in range(60):
            count = chance.randint(1, 3)
            tasks[request] = asyncio.ensure_future(ask(request, count))
            await asyncio.sleep(0)
            if not plain.acquire(request, count):
                expected.append((request, 429, {"Retry-After": "1"}))
            for ended in chance.sample(sorted(tasks), k=min(len(tasks), chance.randint(0, 2))):
                tasks.pop(ended).cancel()
                for _ in range(chance.choice((0, 1, 3))):
                    await asyncio.sleep(0)
                plain.end(ended)
            await turn()
            assert (slots.running, slots.waiting) == (count_of(plain.held), count_of(plain.queue))
            assert [one for one, _ in plain.held] == [one for one in granted if one in dict(plain.held)]
        assert refused == expected
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert (slots.running, slots.waiting) == (0, 0)

    for seed in range(30):
        asyncio.run(scenario(seed))
