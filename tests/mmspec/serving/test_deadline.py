"""The time in which requests must end, and that in which answers do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmspec.pipeline import Pipeline
from mmspec.serving.errors import APIError
from mmspec.serving.runner import Deadline
from mmspec.serving.settings import Limits
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
