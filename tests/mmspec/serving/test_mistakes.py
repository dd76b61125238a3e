"""Mistakes in requests, in our own words: every type of error that pydantic raises for the protocol's classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mmspec.errors import shown
from mmspec.serving.errors import APIError
from mmspec.serving.schemas import ChatCompletionRequest, CompletionRequest, parse

MODEL = {"model": "m"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": "a"}]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": {}}}


def content(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


# Errors by the types of validators in the classes' schemas; None: validators without errors of their own.
ERRORS: dict[str, set[str]] = {
    "str": {"string_type"},
    "int": {"int_type", "greater_than_equal", "less_than_equal"},
    "float": {"float_type", "greater_than", "greater_than_equal", "less_than_equal"},
    "bool": {"bool_type"},
    "list": {"list_type", "too_short", "too_long"},
    "dict": {"dict_type"},
    "literal": {"literal_error"},
    "model": {"model_type"},
    "model-fields": {"missing"},
    "tagged-union": {"union_tag_invalid", "union_tag_not_found", "model_attributes_type"},
    "function-before": {"value_error", "unsupported"},
    "function-after": {"value_error"},
    "function-plain": {"condition"},
    **{kind: set() for kind in ("any", "default", "model-field", "no-info", "nullable")},
}
CASES: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("string_type", {"model": 5}, "model", "@ must be text: got 5"),
    ("condition", {"stop": ["a", 5]}, "stop", "@ must be text or a list of texts: got ['a', 5]"),
    ("string_type", content({"type": "text", "text": 5}), "messages[0].content[0].text", "@ must be text: got 5"),
    (
        "condition",
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        "tools[0].function.name",
        "@ must be 1 to 64 letters, digits, and any of _.-: got ''",
    ),
    ("int_type", {"n": 1.5}, "n", "@ must be a whole number: got 1.5"),
    ("greater_than_equal", {"n": 0}, "n", "@ must be >= 1: got 0"),
    ("less_than_equal", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "@ must be <= 20: got 21"),
    ("float_type", {"temperature": "hot"}, "temperature", "@ must be a number: got 'hot'"),
    ("greater_than", {"repetition_penalty": 0}, "repetition_penalty", "@ must be > 0: got 0"),
    ("bool_type", {"stream": 1}, "stream", "@ must be true or false: got 1"),
    ("list_type", {"messages": 5}, "messages", "@ must be a list: got 5"),
    ("too_short", {"messages": []}, "messages", "@ must be a list of at least 1: got 0"),
    ("too_long", {"messages": CHAT["messages"] * 1025}, "messages", "@ must be a list of at most 1024: got 1025"),
    (
        "dict_type",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema",
        "@ must be an object: got 5",
    ),
    (
        "literal_error",
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "@ must be 'text', 'json_object' or 'json_schema': got 'xml'",
    ),
    ("model_type", {"messages": [5]}, "messages[0]", "@ must be an object: got 5"),
    ("missing", {"messages": [{"role": "user"}]}, "messages[0].content", "@ is required"),
    (
        "unsupported",
        {"use_beam_search": True},
        "use_beam_search",
        "@ is not supported: expected it to be left out, got True",
    ),
    (
        "unsupported",
        {"response_format": {**FORMAT, "json_schema": {"schem": {}, **FORMAT["json_schema"]}}},
        "response_format.json_schema.schem",
        "@ is not supported: expected it to be left out, got {}; did you mean schema?",
    ),
    (
        "unsupported",
        content({"type": "image_url", "image_url": {"url": "a", "urls": 1}}),
        "messages[0].content[0].image_url.urls",
        "@ is not supported: expected it to be left out, got 1; did you mean url?",
    ),
    (
        "union_tag_invalid",
        content({"type": "audio"}),
        "messages[0].content[0].type",
        "@ must be 'text', 'refusal', 'image_url', 'video_url': got 'audio'",
    ),
    ("union_tag_not_found", content({}), "messages[0].content[0].type", "@ is required"),
    ("model_attributes_type", content(5), "messages[0].content[0]", "@ must be an object: got 5"),
    (
        "value_error",
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "@: json_schema goes with the type json_schema",
    ),
    ("value_error", {"top_logprobs": 2}, None, "the body: top_logprobs goes with logprobs: true"),
    (
        "value_error",
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
        "messages[0]",
        "@: tool_call_id goes with the role tool",
    ),
    (
        "value_error",
        {"max_tokens": 5, "max_completion_tokens": 6},
        None,
        "the body: max_tokens and max_completion_tokens are one limit: got 5 and 6",
    ),
    (
        "value_error",
        {"stop": "a" * 513},
        "stop",
        f"stop: expected at most 16 texts of at most 512 characters, got {shown('a' * 513)}",
    ),
    (
        "unsupported",
        {"max_new_tokens": 1},
        "max_new_tokens",
        "@ is not supported: expected it to be left out, got 1; did you mean max_tokens?",
    ),
]
"""Kind of error, fields of a request, the field that is named, and the message, in which ``@`` stands for it."""


@pytest.mark.parametrize(("kind", "fields", "param", "message"), CASES)
def test_messages(kind: str, fields: dict[str, Any], param: str | None, message: str) -> None:
    with pytest.raises(APIError) as caught:
        parse(ChatCompletionRequest, json.dumps({**CHAT, **fields}).encode())
    assert (caught.value.message, caught.value.param) == (message.replace("@", param or ""), param)
    assert not re.search("(?i)input|valid |dictionary|integer|instance|value error", message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt must be a text, token ids, or a list of 1 to 1024 of them: got []"),
        ({"prompt": [1, "a"]}, "prompt must be a text, token ids, or a list of 1 to 1024 of them: got [1, 'a']"),
        ({"prompt": ["a"] * 1025}, "prompt must be a text, token ids, or a list of 1 to 1024 of them: got list ["),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "the body: echo does not go with logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs must be <= 20: got 21"),
    ],
)
def test_completions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(APIError) as caught:
        parse(CompletionRequest, json.dumps({**MODEL, **fields}).encode())
    assert caught.value.message.startswith(message)


def test_values_at_their_limits() -> None:
    parse(CompletionRequest, json.dumps({**MODEL, "prompt": ["a"] * 1024, "logprobs": 20}).encode())
    fields = {"messages": CHAT["messages"] * 1024, "stop": ["a" * 512] * 16, "top_logprobs": 20, "logprobs": True}
    parse(ChatCompletionRequest, json.dumps({**MODEL, **fields}).encode())
    with pytest.raises(APIError, match="at most 16 texts"):
        parse(ChatCompletionRequest, json.dumps({**CHAT, "stop": ["a"] * 17}).encode())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": NaN}', b'{"model": "\\ud800"}', b"[" * 100_000]
)
def test_malformed_bodies(body: bytes) -> None:
    for kind in (ChatCompletionRequest, CompletionRequest):
        with pytest.raises(APIError, match=r"the body must be|model is required") as caught:
            parse(kind, body)
        assert caught.value.status == 400


def validators(schema: Any) -> Iterator[str]:
    """Types of all validators in a schema of pydantic's core."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema["type"]
        for name, value in schema.items():
            if name not in ("metadata", "serialization", "default"):
                yield from validators(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from validators(value)


def test_every_type_of_error_has_a_message() -> None:
    found = {
        kind for cls in (ChatCompletionRequest, CompletionRequest) for kind in validators(cls.__pydantic_core_schema__)
    }
    assert found == set(ERRORS)
    assert {error for kind in found for error in ERRORS[kind]} == {kind for kind, *_ in CASES}
