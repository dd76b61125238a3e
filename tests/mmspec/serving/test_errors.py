"""Errors of requests by endpoint: status, field, message; unexpected exceptions at any stage of a request."""

import json
from typing import Any

import httpx
import pytest

from mmspec.engine.sequence import Sequence
from mmspec.engine.stopping import Stopper
from mmspec.sampling.defaults import Defaults
from mmspec.serving import formats, runner
from mmspec.serving.errors import APIError
from mmspec.serving.media import MediaReader
from mmspec.serving.metrics import Metrics
from mmspec.targets.detokenizer import AnswerReader
from tests.testkit.served import SCENE, TIMEOUT, data_uri, eventually, question

pytestmark = pytest.mark.usefixtures("one_thread")


def user(content):
    return [{"role": "user", "content": content}]


def function(name, **parameters):
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


def form(**schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


URL = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
CALL = {"tools": [function("a")], "tool_choice": "required"}
WRONG = [function("a"), function("wrong", type="x")]
SCHEMA = "tool wrong: json_schema must be a JSON schema that llguidance can follow: Invalid type: x"
BODIES = {
    "v1/chat/completions": question(max_tokens=2),
    "v1/completions": {"model": "tiny-llava", "prompt": "A", "max_tokens": 1},
    "v1/responses": {"model": "tiny-llava", "input": "A", "max_output_tokens": 1},
}
Error = tuple[dict[str, Any], str | None, str]
ENDPOINTS = "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, POST /infill, POST /v1/messages, "
ENDPOINTS += "POST /api/chat, POST /api/generate, POST /v1/messages/count_tokens, GET /api/version, GET /api/tags, "
ENDPOINTS += "GET /api/ps, GET /slots, GET /props, POST /api/show, POST /tokenize, POST /detokenize, "
ENDPOINTS += "GET /v1/models/{name}, GET /v1/models, GET /, "
ERRORS = {
    "v1/chat/completions": [
        ({"messages": user([URL])}, "messages[0].content[0].image_url.url", "image_url must be a data URI"),
        ({"model": "gpt-4o"}, "model", "unknown model: expected 'tiny-llava', got 'gpt-4o'"),
        ({"logit_bias": {"90000": 1}}, None, "biased tokens must be below the vocabulary's size 896: got 90000"),
        ({"n": 9}, "n", "n must be at most 8: got 9"),
        ({"stream": False, "stream_options": {}}, "stream_options", "stream_options goes with stream: true"),
        ({"messages": user("x" * 500_001)}, "messages", "prompts must have at most 500000 characters: got 500001"),
        ({"messages": user("x " * 250_000)}, None, "the prompt must be shorter than the model's context"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice required goes with tools: got none"),
        ({"tools": [function("a")] * 2}, "tools", "tools must have different names: got a, a"),
        ({**CALL, "tool_choice": function("x")}, "tool_choice", "tool_choice must name one of the tools: got 'x'"),
        (
            {**CALL, "stream": False, "min_tokens": 900, "max_tokens": 999, "parallel_tool_calls": False},
            "min_tokens",
            "min_tokens must not go beyond the end of tools: expected at most ",
        ),
        ({**CALL, "ignore_eos": True}, "ignore_eos", "ignore_eos does not go with tools, which ends the output"),
        (
            {"tools": CALL["tools"], **form(const="a"), "stream": False, "min_tokens": 99, "max_tokens": 999},
            "min_tokens",
            "min_tokens must not go beyond the end of tools or response_format: expected at most ",
        ),
        ({"tools": WRONG}, "tools", SCHEMA),
        ({"tools": WRONG, "tool_choice": "required"}, "tools", SCHEMA),
        ({"tools": [function("other", type="y"), *WRONG], "tool_choice": function("wrong")}, "tools", SCHEMA),
        ({"speculative": "a"}, "speculative", "speculative must be one of true, false, 'flash': got 'a'"),
        ({"num_draft_tokens": 65}, "num_draft_tokens", "num_draft_tokens must be at most 64: got 65"),
        ({"num_draft_tokens": -1}, "num_draft_tokens", "num_draft_tokens must be >= 0: got -1"),
        (
            {"speculative": False, "num_draft_tokens": 3},
            "num_draft_tokens",
            "num_draft_tokens must be at most 0 beside speculative: false: got 3",
        ),
    ],
    "v1/completions": [
        ({"prompt": [1, -1]}, None, "token ids must be in [0, "),
        ({"prompt": [[1], [9_000]]}, None, "token ids must be in [0, "),
        ({"prompt": ["x" * 500_000, "x"]}, "prompt", "prompts must have at most 500000 characters: got 500001"),
        ({"prompt": ["A"] * 3, "n": 3}, "prompt", "a request may have at most 8 choices: got 9"),
    ],
    "v1/responses": [
        ({"input": 5}, "input", "input must be a list: got 5"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be >= 1: got 0"),
        ({"response_format": {}}, "response_format", "response_format must be left out: it is text.format here: got"),
        ({"n": 2}, "n", "n must be 1: got 2"),
        ({"background": True}, "background", "background is not supported, clients wait for their responses: expected"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "tools[0].type must be 'function': got 'web_search'"),
        (
            {"tool_choice": "any"},
            "tool_choice",
            'tool_choice must be "none", "auto", "required" or {"type": "function", "name": NAME}',
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format: schema goes with the type"),
        ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is required"),
        ({"input": user([{"type": "input_file"}])}, "input[0].content[0].type", "input[0].content[0].type must be"),
        ({"input": user([5])}, "input[0].content[0]", "input[0].content[0] must be an object: got 5"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type", "input[0].type must be 'message', "),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "input[0]", "input[0]: the content of reasoning must be"),
    ],
    "tokenize": [
        ({}, None, "the body: expected either prompt or messages"),
        ({"prompt": "a", "model": "b"}, "model", "unknown model: expected 'tiny-llava', got 'b'"),
        (
            {"messages": question("a", data_uri(SCENE))["messages"]},
            "messages[0].content[0].image_url.url",
            "tokens are those of texts: got image_url",
        ),
    ],
    "detokenize": [
        ({"tokens": [1 << 40]}, None, "token ids must be in [0, "),
        ({"tokens": ["a"]}, "tokens[0]", "tokens[0] must be a whole number: got 'a'"),
    ],
    "v1/embeddings": [({}, None, "there is no /v1/embeddings here: the model generates text")],
    "chat/completions": [({}, None, "there is no /chat/completions here: the base URL ends with /v1")],
    "v1/conversations/x": [({}, None, "there is no /v1/conversations/x here: use POST /v1/responses with previous_")],
    "v1/audio/speech": [({}, None, "there is no /v1/audio/speech here: the model reads no audio")],
    "v2": [({}, None, "there is no /v2 here: expected one of " + ENDPOINTS)],
    "v1/filesystem": [({}, None, "there is no /v1/filesystem here: expected one of " + ENDPOINTS)],
    "x" * 200: [({}, None, f"there is no /{'x' * 99} here: expected one of " + ENDPOINTS)],
}


@pytest.mark.parametrize(("path", "error"), [(path, one) for path, errors in ERRORS.items() for one in errors])
def test_errors(server, path, error):
    """Of streams, too: these errors precede the first event, unless the field ``stream`` is given."""
    pytest.importorskip("llguidance")
    fields, param, message = error
    for more in ({"stream": True}, {}) if path in BODIES else ({},):
        body = {**BODIES.get(path, {}), **more, **fields}
        response = httpx.post(f"{server.url}/{path}", json=body, timeout=TIMEOUT)
        found = response.json()["error"]
        assert found["message"].startswith(message)
        assert "\n" not in found["message"]
        status = 404 if message.startswith(("there is no", "unknown model")) else 400
        code = "model_not_found" if message.startswith("unknown model") else None
        expected = {"message": found["message"], "type": "invalid_request_error", "param": param, "code": code}
        assert (response.status_code, found) == (status, expected)


def test_kinds_of_errors():
    openais = {400: "invalid_request_error", 429: "rate_limit_error", 499: "invalid_request_error"}
    openais |= {401: "invalid_request_error", 500: "server_error", 503: "server_error"}
    anthropics = openais | {401: "authentication_error", 500: "api_error", 503: "overloaded_error"}
    for status, kind in openais.items():
        error = APIError(status, "Wrong.", "a[0]", "b")
        assert error.content() == {"error": {"message": "Wrong.", "type": kind, "param": "a[0]", "code": "b"}}
        about = {"type": "error", "error": {"type": anthropics[status], "message": "Wrong."}}
        assert error.content("/v1/messages/count_tokens") == about
        assert error.content("/api/chat") == {"error": "Wrong."}


class BrokenError(Exception):
    """Raised by the stages."""


def at_call(number, function):
    """The function, whose call of this number, from 0 on, raises."""
    left = [number]

    def called(*args, **keywords):
        left[0] -= 1
        if left[0] < 0:
            raise BrokenError("out of order")
        return function(*args, **keywords)

    return called


# The object that owns a stage's function, given the server; the function; the call that fails.
STAGES = {
    "media": (lambda server: MediaReader, "read", 0),
    "encoding": (lambda server: server.pipe.processor, "encode", 0),
    "defaults": (lambda server: Defaults, "complete", 0),
    "stopping": (lambda server: Stopper, "limit", 0),
    "key of the batch": (lambda server: server.pipe.target, "batch_key", 0),
    "queue": (lambda server: server.pipe.engine, "submit", 0),
    "prefill": (lambda server: server.pipe.target, "prefill", 0),
    "first token": (lambda server: Sequence, "accept", 0),
    "verify pass": (lambda server: server.pipe.target, "verify", 1),
    "commit": (lambda server: server.pipe.target, "commit", 1),
    "later token": (lambda server: Sequence, "accept", 3),
    "text": (lambda server: AnswerReader, "append", 0),
    "later text": (lambda server: AnswerReader, "append", 2),
    "figures of the first token": (lambda server: server.app.state.metrics.first_token, "observe", 0),
    "figures of later tokens": (lambda server: server.app.state.metrics.next_tokens, "observe", 0),
    "figures of the end": (lambda server: Metrics, "ended", 0),
    "response": (lambda server: formats, "per_request", 0),
    "parameters of the second choice": (lambda server: runner, "replace", 0),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_it_reaches_the_client(stage, stream, server, monkeypatch, caplog):
    body = question("Describe the image.", data_uri(SCENE), temperature=1.0, seed=2**64 - 1, n=2, stream=stream)
    expected = server.post(body)
    assert expected.status_code == 200
    owner, name, number = STAGES[stage]
    where = owner(server)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, at_call(number, getattr(where, name)))
        response = server.post(body)
    events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    found = json.loads(events[-2] if events else response.text)
    assert "out of order" not in response.text  # nothing of the inside
    assert eventually(lambda: "out of order" in caplog.text)
    message = "internal error (BrokenError): details are in the server's log"
    assert found["error"] == {"message": message, "type": "server_error", "param": None, "code": None}
    assert response.status_code == (200 if events else 500)
    if [*STAGES].index(stage) <= [*STAGES].index("first token"):
        assert response.status_code == 500  # of a stream, too, before its first piece
    assert not events or events[-1] == "[DONE]"
    assert eventually(lambda: server.idle)
    again = server.post(body)
    assert again.status_code == 200
    if not stream:
        assert again.json()["choices"] == expected.json()["choices"]
