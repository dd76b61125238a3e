"""openai-python as a client: whole answers, streams, images, choices, log probabilities, errors."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
import pytest

from mmspec.pipeline import Pipeline
from tests.served import QUESTION, SCENE, Served, data_uri, served

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.usefixtures("one_thread")

MESSAGES: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": QUESTION},
            {"type": "image_url", "image_url": {"url": data_uri(SCENE)}},
        ],
    }
]
GREEDY: dict[str, Any] = {"model": "tiny-llava", "temperature": 0, "max_tokens": 20}


def test_synchronous(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny-llava"]
        whole = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 20
        assert whole.metrics["speculative_decoding"]["num_spec_steps"] > 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(messages=MESSAGES, **options, **GREEDY)
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
        assert last.usage == whole.usage
        # An answer goes back as a message.
        turns = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "Which colour?"}]
        assert client.chat.completions.create(messages=turns, **GREEDY).choices[0].message.content
        sampled = client.chat.completions.create(messages=MESSAGES, n=3, seed=1, **{**GREEDY, "temperature": 1.5})
        assert [choice.index for choice in sampled.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in sampled.choices}) > 1
        text = client.completions.create(prompt="A large red", logprobs=2, **GREEDY)
        assert "".join(text.choices[0].logprobs.tokens) == text.choices[0].text
        pieces = client.completions.create(prompt="A large red", stream=True, **GREEDY)
        assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(messages=MESSAGES, presence_penalty=3, **GREEDY)
        assert bad.value.param == "presence_penalty"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.models.retrieve("other")
        assert unknown.value.code == "model_not_found"
        with client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY) as stream:
            next(iter(stream))
    assert server.idle or not server.pipe.engine.core.queued


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


def test_parsed(server: Served) -> None:
    """The helpers that make a schema or a tool of a class, and an instance of the answer; whole and as streams."""
    tool = openai.pydantic_function_tool(Weather)
    asked = {**GREEDY, "max_tokens": 100, "messages": [{"role": "user", "content": "Where?"}]}
    for more in (
        {"response_format": Weather},
        {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
    ):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.parse(**asked, **more).choices[0].message
            with client.chat.completions.stream(**asked, **more) as stream:
                streamed = stream.get_final_completion().choices[0].message
        for message in (whole, streamed):
            found = message.tool_calls[0].function.parsed_arguments if "tools" in more else message.parsed
            assert isinstance(found, Weather)


def test_asynchronous(server: Served) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def streamed() -> str:
                stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
                return "".join([chunk.choices[0].delta.content async for chunk in stream])

            whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
            first, *others = await asyncio.gather(whole, *(streamed() for _ in range(5)))
            assert set(others) == {first.choices[0].message.content}

    asyncio.run(scenario())


def test_a_missing_key(pipe: Pipeline) -> None:
    with served(pipe, api_key="secret") as server:
        for key, right in (("wrong", False), ("secret", True)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if right:
                    assert client.models.list().data
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()
