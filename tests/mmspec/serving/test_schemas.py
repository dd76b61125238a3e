"""Requests: each type of pydantic's errors in our own words; a decision for each published field; forms of messages."""

import importlib
import json
import re
from typing import get_type_hints

import pytest

from mmspec.errors import shown
from mmspec.serving import responses, schemas
from mmspec.serving.errors import APIError
from mmspec.serving.media import Medium
from mmspec.serving.schemas import ChatCompletionRequest, CompletionRequest, conversation, parse

MODEL = {"model": "m"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": "a"}]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": {}}}
BODIES = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"model": "m", "prompt": "a"},
    responses.ResponsesRequest: {"model": "m", "input": "a"},
}


def content(part):
    return {"messages": [{"role": "user", "content": [part]}]}


CASES = [
    ({"model": 5}, "model must be text: got 5"),
    ({"stop": ["a", 5]}, "stop must be text or a list of texts: got ['a', 5]"),
    (content({"type": "text", "text": 5}), "messages[0].content[0].text must be text: got 5"),
    (
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        "tools[0].function.name must be 1 to 64 letters, digits, and any of _.-: got ''",
    ),
    ({"n": 1.5}, "n must be a whole number: got 1.5"),
    ({"n": 0}, "n must be >= 1: got 0"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be <= 20: got 21"),
    ({"temperature": "hot"}, "temperature must be a number: got 'hot'"),
    ({"repetition_penalty": 0}, "repetition_penalty must be > 0: got 0"),
    ({"stream": 1}, "stream must be true or false: got 1"),
    ({"messages": 5}, "messages must be a list: got 5"),
    ({"messages": []}, "messages must be a list of at least 1: got 0"),
    ({"messages": CHAT["messages"] * 1025}, "messages must be a list of at most 1024: got 1025"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema must be an object: got 5",
    ),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type must be 'text', 'json_object' or 'json_schema': got 'xml'",
    ),
    ({"messages": [5]}, "messages[0] must be an object: got 5"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
    ({"use_beam_search": True}, "use_beam_search is not supported: expected it to be left out, got true"),
    (
        {"response_format": {**FORMAT, "json_schema": {"schem": {}, **FORMAT["json_schema"]}}},
        "response_format.json_schema.schem is not supported: expected it to be left out, got {}; did you mean schema?",
    ),
    (
        content({"type": "image_url", "image_url": {"url": "a", "urls": 1}}),
        "messages[0].content[0].image_url.urls is not supported: expected it to be left out, got 1; did you mean url?",
    ),
    (
        content({"type": "audio"}),
        "messages[0].content[0].type must be 'text', 'refusal', 'image_url', 'video_url': got 'audio'",
    ),
    (content({}), "messages[0].content[0].type is required"),
    (content(5), "messages[0].content[0] must be an object: got 5"),
    ({"response_format": {"type": "json_schema"}}, "response_format: json_schema goes with the type json_schema"),
    ({"top_logprobs": 2}, "the body: top_logprobs goes with logprobs: true"),
    (
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
        "messages[0]: tool_call_id goes with the role tool",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "refusal": "b"}]},
        "messages[0].refusal is not supported: expected it to be left out, got 'b'",
    ),
    (
        {"max_tokens": 5, "max_completion_tokens": 6},
        "the body: max_tokens and max_completion_tokens are one limit: got 5 and 6",
    ),
    ({"stop": "a" * 513}, f"stop: expected at most 16 texts of at most 512 characters, got {shown('a' * 513)}"),
    (
        {"max_new_tokens": 1},
        "max_new_tokens is not supported: expected it to be left out, got 1; did you mean max_tokens?",
    ),
]
"""Fields of a request, and the message, which begins with the path of the invalid field or ``the body``."""

PROMPT = "prompt must be a text, token ids, or a list of 1 to 1024 of them: got "
COMPLETIONS = [
    ({"prompt": []}, PROMPT + "[]"),
    ({"prompt": [1, "a"]}, PROMPT + "[1, 'a']"),
    ({"prompt": ["a"] * 1025}, PROMPT + shown(["a"] * 1025)),
    (
        {"prompt": "a", "echo": True, "logprobs": 1},
        "the body: echo does not go with logprobs, which are those of the output's tokens",
    ),
    ({"prompt": "a", "logprobs": 21}, "logprobs must be <= 20: got 21"),
]


@pytest.mark.parametrize(("fields", "message"), [*CASES, *COMPLETIONS])
def test_messages(fields, message):
    kind, valid = (CompletionRequest, MODEL) if "prompt" in fields else (ChatCompletionRequest, CHAT)
    with pytest.raises(APIError) as caught:
        parse(kind, json.dumps({**valid, **fields}).encode())
    param = None if message.startswith("the body") else message.split()[0].rstrip(":")
    assert (caught.value.message, caught.value.param) == (message, param)
    assert not re.search("(?i)input|valid |dictionary|integer|instance|value error", message)


def test_values_at_their_limits():
    parse(CompletionRequest, json.dumps({**MODEL, "prompt": ["a"] * 1024, "logprobs": 20}).encode())
    fields = {"messages": CHAT["messages"] * 1024, "stop": ["a" * 512] * 16, "top_logprobs": 20, "logprobs": True}
    parse(ChatCompletionRequest, json.dumps({**MODEL, **fields}).encode())
    with pytest.raises(APIError, match="at most 16 texts"):
        parse(ChatCompletionRequest, json.dumps({**CHAT, "stop": ["a"] * 17}).encode())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": NaN}', b'{"model": "\\ud800"}', b"[" * 100_000]
)
def test_malformed_bodies(body):
    for kind in (ChatCompletionRequest, CompletionRequest):
        with pytest.raises(APIError, match=r"the body must be|model is required") as caught:
            parse(kind, body)
        assert caught.value.status == 400


CHAT_PARAMETER = "chat.chat_completion_"
PUBLISHED = [
    (ChatCompletionRequest, "chat.completion_create_params.CompletionCreateParamsStreaming"),
    (CompletionRequest, "completion_create_params.CompletionCreateParamsStreaming"),
    (responses.ResponsesRequest, "responses.response_create_params.ResponseCreateParamsStreaming"),
    (schemas.StreamOptions, "chat.chat_completion_stream_options_param.ChatCompletionStreamOptionsParam"),
    (schemas.StreamOptions, "responses.response_create_params.StreamOptions"),
    *(
        (schemas.ChatMessage, f"{CHAT_PARAMETER}{role}_message_param.ChatCompletion{role.capitalize()}MessageParam")
        for role in ("system", "developer", "user", "assistant", "tool")
    ),
    (schemas.TextPart, "chat.chat_completion_content_part_text_param.ChatCompletionContentPartTextParam"),
    (schemas.RefusalPart, "chat.chat_completion_content_part_refusal_param.ChatCompletionContentPartRefusalParam"),
    (schemas.ImagePart, "chat.chat_completion_content_part_image_param.ChatCompletionContentPartImageParam"),
    (schemas.ToolCall, f"{CHAT_PARAMETER}message_function_tool_call_param.ChatCompletionMessageFunctionToolCallParam"),
    (schemas.Tool, "chat.chat_completion_function_tool_param.ChatCompletionFunctionToolParam"),
    (schemas.Function, "shared_params.function_definition.FunctionDefinition"),
    (schemas.ResponseFormat, "shared_params.response_format_json_schema.ResponseFormatJSONSchema"),
    (schemas.JSONSchema, "shared_params.response_format_json_schema.JSONSchema"),
    (responses.Item, "responses.easy_input_message_param.EasyInputMessageParam"),
    (responses.Item, "responses.response_output_message_param.ResponseOutputMessageParam"),
    (responses.Item, "responses.response_function_tool_call_param.ResponseFunctionToolCallParam"),
    (responses.Item, "responses.response_input_item_param.FunctionCallOutput"),
    (responses.FunctionTool, "responses.function_tool_param.FunctionToolParam"),
    (schemas.TextPart, "responses.response_input_text_param.ResponseInputTextParam"),
    (schemas.TextPart, "responses.response_output_text_param.ResponseOutputTextParam"),
    (schemas.ImagePart, "responses.response_input_image_param.ResponseInputImageParam"),
    (responses._TextConfig, "responses.response_text_config_param.ResponseTextConfigParam"),
    (
        responses._TextFormat,
        "responses.response_format_text_json_schema_config_param.ResponseFormatTextJSONSchemaConfigParam",
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), PUBLISHED)
def test_every_published_field_has_a_decision(ours, theirs):
    module, _, name = f"openai.types.{theirs}".rpartition(".")
    try:
        published = set(get_type_hints(getattr(importlib.import_module(module), name)))
    except (ImportError, AttributeError):
        pytest.skip(f"this version of openai has no {theirs}")
    names = {field.alias or name for name, field in ours.model_fields.items()}
    moved = {  # to a message's content or calls
        schemas.ChatMessage: {"refusal"},
        responses.Item: {"type", "call_id", "arguments", "output"},
    }
    assert published <= names | {*ours.ignored, *ours.neutral, *ours.refused} | moved.get(ours, set())


@pytest.mark.parametrize("kind", BODIES)
def test_refusals_are_named_with_their_reason(kind):
    for name, reason in kind.refused.items():
        with pytest.raises(APIError) as caught:
            parse(kind, json.dumps({**BODIES[kind], name: {"x": 1}}).encode())
        expected = f"{name} is not supported, {reason}: expected it to be left out, got {{'x': 1}}"
        assert (caught.value.message, caught.value.param) == (expected, name)


@pytest.mark.parametrize("kind", BODIES)
def test_ignored_and_neutral_fields_leave_no_trace(kind):
    plain = parse(kind, json.dumps(BODIES[kind]).encode())
    more = {name: {"x": 1} for name in kind.ignored} | {name: values[0] for name, values in kind.neutral.items()}
    more |= dict.fromkeys(set(kind.model_fields) - set(BODIES[kind]))
    assert plain.constraint() is None
    assert parse(kind, json.dumps({**BODIES[kind], **more}).encode()) == plain
    assert not set(kind.ignored) & set(kind.model_fields)


def test_text_is_no_format_with_a_grammar():
    asked = {**BODIES[CompletionRequest], "response_format": {"type": "text"}}
    assert parse(CompletionRequest, json.dumps(asked).encode()).constraint() is None


def conversation_of(*messages, reads_media=False):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return conversation(parse(ChatCompletionRequest, body).messages, reads_media)


@pytest.mark.parametrize(
    ("content", "forms"),
    [
        ("Be brief.", [{"role": "system", "name": "rules", "content": "Be brief."}]),
        ("Be brief.", [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]),
        ("", [{"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "assistant", "content": ""}]),
        (
            "No.",
            [
                {"role": "assistant", "name": "bob", "refusal": "No."},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "assistant", "content": "No.", "refusal": "Never."},
            ],
        ),
    ],
)
def test_forms_of_messages(content, forms):
    """Names of speakers are ignored, refusals are text."""
    for form in forms:
        role = form["role"].replace("developer", "system")
        assert conversation_of(form) == ([{"role": role, "content": content}], [])


def test_calls_results_and_reasoning():
    """A result has its function's name, unless it has its own."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    results = [{"role": "tool", "content": "1", "tool_call_id": name} for name in "ab"]
    named = {"role": "tool", "content": "2", "name": "g", "tool_call_id": "a"}
    found, _ = conversation_of(said | {"reasoning": "Hm"}, *results, named, {"role": "assistant", "content": "B"})
    assert found[0] == said | dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "Hm")
    assert found[1:] == [results[0] | {"name": "f"}, results[1], named, {"role": "assistant", "content": "B"}]


def test_forms_of_an_image():
    medium = Medium("image", "data:x", "messages[0].content[0].image_url.url")
    for form in ("data:x", {"url": "data:x", "detail": "high"}):
        found = conversation_of(
            {"role": "user", "content": [{"type": "image_url", "image_url": form}]}, reads_media=True
        )
        assert found == ([{"role": "user", "content": [{"type": "image"}]}], [medium])
