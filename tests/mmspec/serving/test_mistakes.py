"""Mistakes in requests, in our own words: every type of error that pydantic raises for the protocol's classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mmspec.serving.errors import APIError
from mmspec.serving.schemas import ChatRequest, CompletionRequest, parse

MODEL = {"model": "m"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": "a"}]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": {}}}


def content(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


# Errors by the types of validators in the classes' schemas; None: validators without errors of their own.
ERRORS: dict[str, set[str]] = {
    "str": {"string_type"},
    "int": {"int_type", "greater_than_equal"},
    "bool": {"bool_type"},
    "list": {"list_type", "too_short", "too_long"},
    "dict": {"dict_type"},
    "literal": {"literal_error"},
    "model": {"model_type"},
    "model-fields": {"missing"},
    "tagged-union": {"union_tag_invalid", "union_tag_not_found", "model_attributes_type"},
    "function-before": {"value_error", "unknown_field"},
    "function-after": {"value_error"},
    **{kind: set() for kind in ("any", "default", "model-field", "no-info", "nullable")},
}
CASES: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("string_type", {"model": 5}, "model", "model must be text: got 5"),
    (
        "value_error",
        {"stop": ["a", 5]},
        "stop",
        "stop must be text or a list of texts, none of them empty: got ['a', 5]",
    ),
    (
        "string_type",
        content({"type": "text", "text": 5}),
        "messages[0].content[0].text",
        "messages[0].content[0].text must be text: got 5",
    ),
    (
        "value_error",
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        "tools[0].function.name",
        "name must be 1 to 64 letters, digits, and any of _.-: got ''",
    ),
    ("int_type", {"n": 1.5}, "n", "n must be a whole number: got 1.5"),
    ("greater_than_equal", {"n": 0}, "n", "n must be >= 1: got 0"),
    (
        "value_error",
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "top_logprobs must be None or a whole number in [0, 20]: got 21",
    ),
    ("value_error", {"temperature": "hot"}, "temperature", "temperature must be 0 or >= 0.0001: got 'hot'"),
    ("bool_type", {"stream": 1}, "stream", "stream must be true or false: got 1"),
    ("list_type", {"messages": 5}, "messages", "messages must be a list: got 5"),
    ("too_short", {"messages": []}, "messages", "messages must be a list of at least 1: got 0"),
    (
        "too_long",
        {"messages": CHAT["messages"] * 1025},
        "messages",
        "messages must be a list of at most 1024: got 1025",
    ),
    (
        "dict_type",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema must be an object: got 5",
    ),
    (
        "literal_error",
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "response_format.type must be 'text', 'json_object' or 'json_schema': got 'xml'",
    ),
    ("model_type", {"messages": [5]}, "messages[0]", "messages[0] must be an object: got 5"),
    ("missing", {"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is required"),
    (
        "unknown_field",
        {"use_beam_search": True},
        "use_beam_search",
        "use_beam_search is not supported: expected it to be left out, got True",
    ),
    (
        "unknown_field",
        {"response_format": {**FORMAT, "json_schema": {"schem": {}, **FORMAT["json_schema"]}}},  # type: ignore[dict-item]
        "response_format.json_schema.schem",
        "response_format.json_schema.schem is not supported: expected it to be left out, got {}; did you mean schema?",
    ),
    (
        "unknown_field",
        content({"type": "text", "text": "a", "tex": 1}),
        "messages[0].content[0].tex",
        "messages[0].content[0].tex is not supported: expected it to be left out, got 1; did you mean text?",
    ),
    (
        "unknown_field",
        content({"type": "image_url", "image_url": {"url": "a", "urls": 1}}),
        "messages[0].content[0].image_url.urls",
        "messages[0].content[0].image_url.urls is not supported: expected it to be left out, got 1; did you mean url?",
    ),
    (
        "union_tag_invalid",
        content({"type": "audio"}),
        "messages[0].content[0].type",
        "messages[0].content[0].type must be 'text', 'refusal', 'image_url', 'video_url': got 'audio'",
    ),
    ("union_tag_not_found", content({}), "messages[0].content[0].type", "messages[0].content[0].type is required"),
    ("model_attributes_type", content(5), "messages[0].content[0]", "messages[0].content[0] must be an object: got 5"),
    (
        "value_error",
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "response_format: json_schema goes with the type json_schema",
    ),
    ("value_error", {"top_logprobs": 2}, None, "the body: top_logprobs goes with logprobs: true"),
]


@pytest.mark.parametrize(("kind", "fields", "param", "message"), CASES)
def test_messages(kind: str, fields: dict[str, Any], param: str | None, message: str) -> None:
    with pytest.raises(APIError) as caught:
        parse(ChatRequest, json.dumps({**CHAT, **fields}).encode())
    assert (caught.value.message, caught.value.param) == (message, param)
    assert not re.search("(?i)input|valid |dictionary|integer|instance|value error", message)


def test_a_body_of_another_type() -> None:
    with pytest.raises(APIError, match=r"^the body must be an object: got \[\]$"):
        parse(CompletionRequest, b"[]")


def validators(schema: Any) -> Iterator[str]:
    """Types of all validators in a schema of pydantic's core."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema["type"]
        for name, value in schema.items():
            if name not in ("metadata", "serialization"):
                yield from validators(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from validators(value)


def test_every_type_of_error_has_a_message() -> None:
    found = {kind for cls in (ChatRequest, CompletionRequest) for kind in validators(cls.__pydantic_core_schema__)}
    assert found == set(ERRORS)
    assert {error for kind in found for error in ERRORS[kind]} == {kind for kind, *_ in CASES}
