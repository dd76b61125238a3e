"""The time in which a request must end, and slots of choices."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmspec.pipeline import Pipeline
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits
from mmspec.serving.runner import Deadline, Slots
from tests.served import LONG, Served, eventually, question, served

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
    for _ in range(3):
        await asyncio.sleep(0)


def test_slots_are_given_in_order() -> None:
    async def scenario() -> None:
        slots, order, tasks = Slots(3, 10), [], []

        async def ask(name: str, count: int) -> None:
            await slots.acquire(count)
            order.append(name)

        for name, count in (("a", 2), ("b", 2), ("c", 1)):
            tasks.append(asyncio.ensure_future(ask(name, count)))
            await turn()
        assert order == ["a"]  # c would fit, but b is first
        assert (slots.running, slots.waiting) == (2, 3)
        slots.release()
        await turn()
        assert (order, slots.running, slots.waiting) == (["a", "b"], 3, 1)
        slots.release()
        await turn()
        assert (order, slots.running, slots.waiting) == (["a", "b", "c"], 3, 0)

    asyncio.run(scenario())


def test_the_queue_is_limited() -> None:
    async def scenario() -> None:
        slots = Slots(1, 2)
        await slots.acquire(1)
        waiting = asyncio.ensure_future(slots.acquire(1))
        await turn()
        with pytest.raises(APIError) as found:
            await slots.acquire(2)
        assert (found.value.status, found.value.headers) == (429, {"Retry-After": "1"})
        waiting.cancel()
        await turn()
        assert slots.waiting == 0
        nothing_waits = Slots(1, 0)
        await nothing_waits.acquire(1)
        with pytest.raises(APIError):
            await nothing_waits.acquire(1)

    asyncio.run(scenario())


def test_a_cancelled_wait_lets_the_next_in() -> None:
    async def scenario() -> None:
        slots = Slots(2, 10)
        await slots.acquire(1)
        first, second = (asyncio.ensure_future(slots.acquire(count)) for count in (2, 1))
        await turn()
        assert slots.waiting == 3
        first.cancel()
        await turn()
        assert second.done()
        assert (slots.running, slots.waiting) == (2, 0)

    asyncio.run(scenario())


def test_a_wait_that_is_granted_and_cancelled_in_one_turn() -> None:
    async def scenario(release_first: bool) -> None:
        slots = Slots(1, 10)
        await slots.acquire(1)
        waiting = asyncio.ensure_future(slots.acquire(1))
        await turn()
        for act in (slots.release, waiting.cancel) if release_first else (waiting.cancel, slots.release):
            act()
        await turn()
        assert (slots.running, slots.waiting) == (0, 0)

    asyncio.run(scenario(True))
    asyncio.run(scenario(False))


def test_random_orders_leave_no_slot_behind() -> None:
    async def client(slots: Slots, chance: random.Random, most: list[int]) -> None:
        count = chance.randint(1, 3)
        try:
            await slots.acquire(count)
        except APIError:
            return
        most.append(slots.running)
        try:
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
        finally:
            slots.release(count)

    async def scenario(seed: int) -> None:
        chance, slots, most = random.Random(seed), Slots(4, 6), [0]
        tasks = []
        for _ in range(60):
            tasks.append(asyncio.ensure_future(client(slots, chance, most)))
            if chance.random() < 0.5:
                chance.choice(tasks).cancel()
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert (slots.running, slots.waiting) == (0, 0)
        assert max(most) <= 4

    for seed in range(30):
        asyncio.run(scenario(seed))
