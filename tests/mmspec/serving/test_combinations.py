"""Requests that combine several prompts with several choices, seeds, streams and a chunked body."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mmspec.pipeline import Pipeline
from mmspec.serving.tools import GENERIC, prompted
from tests.served import LONG, QUESTION, SCENE, TIMEOUT, Served, data_uri, eventually, question, texts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["A large red", "There is a", "Three"]
SAMPLED = {"temperature": 1.5, "top_p": 0.95}
TOKENS = 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompts", "n"), [(1, 3), (2, 1), (2, 2), (3, 2)])
def test_the_seed_of_a_choice_depends_on_its_place_among_those_of_its_prompt(
    server: Served, pipe: Pipeline, prompts: int, n: int, stream: bool
) -> None:
    expected = [
        pipe.generate(prompt, max_new_tokens=TOKENS, chat_template=False, seed=7 + number, **SAMPLED).text
        for prompt in PROMPTS[:prompts]
        for number in range(n)
    ]
    assert len(set(expected)) == len(expected)
    body: dict[str, Any] = {"model": "tiny-llava", "prompt": PROMPTS[:prompts], "n": n, "seed": 7, **SAMPLED}
    assert texts(server.post({**body, "max_tokens": TOKENS, "stream": stream}, "completions")) == expected


def test_usage_and_figures_are_those_of_all_choices(server: Served, pipe: Pipeline) -> None:
    """A prompt's tokens count once."""
    body = {"model": "tiny-llava", "prompt": PROMPTS, "n": 2, "temperature": 0, "max_tokens": TOKENS}
    alone = [pipe.generate(prompt, max_new_tokens=TOKENS, chat_template=False) for prompt in PROMPTS]
    found = server.post(body, "completions").json()
    usage = found["usage"]
    assert usage["prompt_tokens"] == sum(one.stats.num_prompt_tokens for one in alone)
    assert usage["completion_tokens"] == 2 * sum(len(one.token_ids) for one in alone)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [choice["text"] for choice in found["choices"]] == [one.text for one in alone for _ in range(2)]


@pytest.mark.parametrize(("prompts", "n", "status"), [(8, 1, 200), (4, 2, 200), (1, 8, 200), (9, 1, 400), (3, 3, 400)])
def test_choices_of_all_prompts_together_are_limited(server: Served, prompts: int, n: int, status: int) -> None:
    body = {"model": "tiny-llava", "prompt": ["A"] * prompts, "n": n, "max_tokens": 1}
    response = server.post(body, "completions")
    assert response.status_code == status
    if status == 400:
        message = f"a request may have at most 8 choices: got {prompts * n}"
        assert (response.json()["error"]["message"], response.json()["error"]["param"]) == (message, "prompt")


def test_logprobs_of_several_prompts_and_choices(server: Served) -> None:
    body = {"model": "tiny-llava", "seed": 7, "max_tokens": TOKENS, "logprobs": 2, **SAMPLED}
    together = server.post({**body, "prompt": PROMPTS[:2], "n": 2}, "completions").json()["choices"]
    alone = [server.post({**body, "prompt": one, "n": 2}, "completions").json()["choices"] for one in PROMPTS[:2]]
    for found, expected in zip(together, [choice for choices in alone for choice in choices], strict=True):
        assert found["text"] == expected["text"]
        for name in ("tokens", "text_offset"):
            assert found["logprobs"][name] == expected["logprobs"][name]


def test_required_calls_beside_images(server: Served, pipe: Pipeline) -> None:
    """Each choice is the call that the same grammar gives in the pipeline, with the image in the prompt."""
    pytest.importorskip("llguidance")
    shape = {"type": "object", "properties": {"colour": {"enum": ["red", "green", "blue"]}}, "required": ["colour"]}
    shape["additionalProperties"] = False
    tool = {"name": "say", "parameters": shape}
    body = question(QUESTION, data_uri(SCENE), tools=[{"type": "function", "function": tool}], max_tokens=60, n=2)
    body |= {"tool_choice": "required", "parallel_tool_calls": False}
    found = server.post(body).json()
    items = [{"type": "image", "path": str(SCENE)}, {"type": "text", "text": QUESTION}]
    messages = prompted([{"role": "user", "content": items}], [tool])
    alone = pipe.generate(
        messages, max_new_tokens=60, grammar=GENERIC.grammar([tool], marked=True, several=False), temperature=0
    )
    said = json.loads(alone.text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert found["usage"]["prompt_tokens"] == alone.stats.num_prompt_tokens
    for choice in found["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert json.loads(call["function"]["arguments"]) == said["arguments"]
        assert said["arguments"]["colour"] in ("red", "green", "blue")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_several_prompts_and_choices_goes_away(
    server: Served, slow: Callable[[float], None], stream: bool
) -> None:
    slow(0.05)
    body = {"model": "tiny-llava", "prompt": PROMPTS[:2], "n": 2, "stream": stream, **LONG}
    content = json.dumps(body).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        assert eventually(lambda: len(server.pipe.engine.core.running) == 4)
    assert eventually(lambda: server.idle)
    assert texts(server.post({**body, "stream": False, "max_tokens": 2}, "completions"))


def test_a_chunked_body_is_that_of_one_piece(server: Served) -> None:
    body = {"model": "tiny-llava", "prompt": PROMPTS[:2], "n": 2, "seed": 3, "max_tokens": TOKENS, **SAMPLED}
    content = json.dumps(body).encode()
    pieces = iter([content[:7], content[7:8], content[8:]])
    chunked = httpx.post(f"{server.url}/v1/completions", content=pieces, timeout=TIMEOUT)
    assert "content-length" not in chunked.request.headers
    assert texts(chunked) == texts(server.post(body, "completions"))
