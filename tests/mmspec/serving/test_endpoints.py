"""What clients send beyond the plain case: forms of messages and prompts, echo, tokens, names, other paths."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mmspec import UserError
from mmspec.pipeline import Pipeline
from tests.served import QUESTION, SCENE, TIMEOUT, Served, data_uri, question, served, texts

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "A large red"
GREEDY: dict[str, Any] = {"model": "tiny-llava", "temperature": 0, "max_tokens": 8}


def completion(server: Served, **fields: Any) -> list[str]:
    return texts(server.post({**GREEDY, **fields}, "completions"))


def answer(server: Served, messages: list[Any], **fields: Any) -> list[str]:
    return texts(server.post({**GREEDY, "messages": messages, **fields}))


def test_forms_of_an_image(server: Served) -> None:
    expected = answer(server, question(QUESTION, uri := data_uri(SCENE))["messages"])
    for form in (uri, {"url": uri, "detail": "high"}, {"url": uri, "detail": "low"}):
        parts = [{"type": "image_url", "image_url": form}, {"type": "text", "text": QUESTION}]
        assert answer(server, [{"role": "user", "content": parts}]) == expected


def test_answers_without_content(server: Served) -> None:
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "?"},
    ]
    expected = answer(server, turns)
    for said in ({"role": "assistant", "content": None}, {"role": "assistant"}):
        assert answer(server, [turns[0], said, turns[2]], reasoning_effort="low") == expected
    response = server.post({**GREEDY, "messages": [{"role": "user", "content": None}]})
    assert response.json()["error"]["message"] == "messages[0].content is required"


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_token_ids_and_echo(server: Served, pipe: Pipeline, stream: bool) -> None:
    ids = pipe.io.tokenizer(TEXT)["input_ids"]
    said = pipe.generate(TEXT, max_new_tokens=8, chat_template=False).text
    assert pipe.generate(ids, max_new_tokens=8).text == said
    for prompt in (TEXT, ids, [ids]):
        assert completion(server, prompt=prompt, stream=stream) == [said]
    given = pipe.io.tokenizer.decode(ids)
    assert completion(server, prompt=[ids, ids[:2]], n=2, echo=True, stream=stream)[:2] == [given + said] * 2
    assert completion(server, prompt=TEXT, echo=True, stream=stream) == [TEXT + said]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [1, -1]}, "token ids must be in [0, 8191]: got -1"),
        ({"prompt": [[1], [9_000]]}, "token ids must be in [0, 8191]: got 9000"),
        ({"prompt": []}, "prompt must be a text, token ids, or a list of 1 to 1024 of them: got []"),
        ({"prompt": [1, "a"]}, "prompt must be a text, token ids, or a list of 1 to 1024 of them: got [1, 'a']"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "the body: echo does not go with logprobs"),
    ],
)
def test_mistakes_in_prompts(server: Served, pipe: Pipeline, fields: dict[str, Any], message: str) -> None:
    response = server.post({**GREEDY, **fields}, "completions")
    assert response.status_code == 400
    found = response.json()["error"]["message"]
    assert found.startswith(message.replace("8191", str(len(pipe.io.tokenizer) - 1)))


def test_an_images_token_needs_its_image(pipe: Pipeline) -> None:
    token = pipe.io.tokenizer.convert_tokens_to_ids(pipe.hf_processor.image_token)
    with pytest.raises(UserError, match=f"images and videos need chat messages: got their token {token}"):
        pipe.generate([1, token])


def test_structured_completions(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (text,) = completion(server, prompt="A: ", response_format=form, max_tokens=20)
    assert json.loads(text)["a"] in (1, 2)


def test_tokens(server: Served, pipe: Pipeline) -> None:
    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(f"{server.url}/{path}", json=body, timeout=TIMEOUT)
        return response.json()

    ids = pipe.io.tokenizer(TEXT)["input_ids"]
    names = pipe.io.tokenizer.convert_ids_to_tokens(ids)
    limit = {"max_model_len": pipe.context_limit}
    assert post("tokenize", {"model": "tiny-llava", "prompt": TEXT, "return_token_strs": True}) == {
        **limit,
        "count": len(ids),
        "tokens": ids,
        "token_strs": names,
    }
    plain = pipe.io.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert post("tokenize", {"prompt": TEXT, "add_special_tokens": False})["tokens"] == plain
    messages = question()["messages"]
    chat = post("tokenize", {"messages": messages})
    assert chat["count"] == pipe.generate(messages, max_new_tokens=1).stats.num_prompt_tokens
    assert post("detokenize", {"tokens": plain}) == {"prompt": TEXT}
    for path, body, message in (
        ("tokenize", {}, "the body: expected either prompt or messages"),
        ("tokenize", {"prompt": "a", "model": "b"}, "unknown model: expected 'tiny-llava', got 'b'"),
        (
            "tokenize",
            {"messages": question("a", data_uri(SCENE))["messages"]},
            "tokens are those of texts: got image_url",
        ),
        ("detokenize", {"tokens": [1 << 40]}, f"token ids must be in [0, {len(pipe.io.tokenizer) - 1}]: got {1 << 40}"),
        ("detokenize", {"tokens": ["a"]}, "tokens[0] must be a whole number: got 'a'"),
    ):
        assert post(path, body)["error"]["message"] == message


def test_other_names_of_the_model(pipe: Pipeline) -> None:
    with served(pipe, names=["gpt-4o", "other"]) as server:
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["gpt-4o", "other"]
        for name, status in (("gpt-4o", 200), ("other", 200), ("tiny-llava", 404)):
            response = server.post({**GREEDY, "model": name, "prompt": "1 + 1", "max_tokens": 1}, "completions")
            assert response.status_code == status
            assert httpx.get(f"{server.url}/v1/models/{name}").status_code == status
            if status == 200:
                assert response.json()["model"] == "gpt-4o"
        assert 'model_name="gpt-4o"' in httpx.get(f"{server.url}/metrics").text
        assert "serve: gpt-4o\n" in httpx.get(server.url).text


def test_paths(server: Served) -> None:
    page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    unknown = httpx.get(f"{server.url}/v2").json()["error"]["message"]
    for endpoint in ("POST /v1/chat/completions", "DELETE /v1/responses/{name}", "GET /v1/models", "GET /livez"):
        assert endpoint in page.text
        assert endpoint in unknown
    for path, message in (
        ("v1/embeddings", "there is no /v1/embeddings here: the model generates text"),
        ("chat/completions", "there is no /chat/completions here: the base URL ends with /v1"),
        (
            "v1/conversations/x",
            "there is no /v1/conversations/x here: use POST /v1/responses with previous_response_id",
        ),
        ("v1/audio/speech", "there is no /v1/audio/speech here: the model reads no audio"),
        ("v2", "there is no /v2 here: expected one of POST /v1/chat/completions, "),
    ):
        response = httpx.post(f"{server.url}/{path}", json={})
        assert response.status_code == 404
        assert response.json()["error"]["message"].startswith(message)
