"""Every field of OpenAI's published requests is implemented, ignored, or refused with a reason."""

from __future__ import annotations

import importlib
import json
from typing import Any, get_type_hints

import pytest

pytest.importorskip("openai")

from mmspec.serving.errors import APIError
from mmspec.serving.media import Medium
from mmspec.serving.responses import (
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Message,
    ResponsesRequest,
    _Image,
    _Text,
    _TextConfig,
    _TextFormat,
)
from mmspec.serving.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Fields,
    Function,
    ImagePart,
    JSONSchema,
    RefusalPart,
    ResponseFormat,
    StreamOptions,
    TextPart,
    Tool,
    ToolCall,
    conversation,
    parse,
)

PUBLISHED: list[tuple[type[Fields], str]] = [
    (ChatCompletionRequest, "chat.completion_create_params.CompletionCreateParamsStreaming"),
    (CompletionRequest, "completion_create_params.CompletionCreateParamsStreaming"),
    (ResponsesRequest, "responses.response_create_params.ResponseCreateParamsStreaming"),
    (StreamOptions, "chat.chat_completion_stream_options_param.ChatCompletionStreamOptionsParam"),
    (StreamOptions, "responses.response_create_params.StreamOptions"),
    *(
        (ChatMessage, f"chat.chat_completion_{role}_message_param.ChatCompletion{role.capitalize()}MessageParam")
        for role in ("system", "developer", "user", "assistant", "tool")
    ),
    (TextPart, "chat.chat_completion_content_part_text_param.ChatCompletionContentPartTextParam"),
    (RefusalPart, "chat.chat_completion_content_part_refusal_param.ChatCompletionContentPartRefusalParam"),
    (ImagePart, "chat.chat_completion_content_part_image_param.ChatCompletionContentPartImageParam"),
    (ToolCall, "chat.chat_completion_message_function_tool_call_param.ChatCompletionMessageFunctionToolCallParam"),
    (Tool, "chat.chat_completion_function_tool_param.ChatCompletionFunctionToolParam"),
    (Function, "shared_params.function_definition.FunctionDefinition"),
    (ResponseFormat, "shared_params.response_format_json_schema.ResponseFormatJSONSchema"),
    (JSONSchema, "shared_params.response_format_json_schema.JSONSchema"),
    (Message, "responses.easy_input_message_param.EasyInputMessageParam"),
    (Message, "responses.response_output_message_param.ResponseOutputMessageParam"),
    (FunctionCall, "responses.response_function_tool_call_param.ResponseFunctionToolCallParam"),
    (FunctionCallOutput, "responses.response_input_item_param.FunctionCallOutput"),
    (FunctionTool, "responses.function_tool_param.FunctionToolParam"),
    (_Text, "responses.response_input_text_param.ResponseInputTextParam"),
    (_Text, "responses.response_output_text_param.ResponseOutputTextParam"),
    (_Image, "responses.response_input_image_param.ResponseInputImageParam"),
    (_TextConfig, "responses.response_text_config_param.ResponseTextConfigParam"),
    (_TextFormat, "responses.response_format_text_json_schema_config_param.ResponseFormatTextJSONSchemaConfigParam"),
]


@pytest.mark.parametrize(("ours", "theirs"), PUBLISHED)
def test_every_published_field_has_a_decision(ours: type[Fields], theirs: str) -> None:
    module, _, name = f"openai.types.{theirs}".rpartition(".")
    try:
        published = set(get_type_hints(getattr(importlib.import_module(module), name)))
    except (ImportError, AttributeError):
        pytest.skip(f"this version of openai has no {theirs}")
    names = {field.alias or name for name, field in ours.model_fields.items()}
    # A refusal that stands for an assistant's content is moved there.
    decided = {*names, *ours.ignored, *ours.neutral, *ours.refused, *(["refusal"] if ours is ChatMessage else [])}
    assert published - decided == set()


BODIES: dict[type[Fields], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"model": "m", "prompt": "a"},
    ResponsesRequest: {"model": "m", "input": "a"},
}


@pytest.mark.parametrize("kind", BODIES)
def test_refusals_are_named_with_their_reason(kind: type[Fields]) -> None:
    for name, reason in kind.refused.items():
        with pytest.raises(APIError) as caught:
            parse(kind, json.dumps({**BODIES[kind], name: {"x": 1}}).encode())
        expected = f"{name} is not supported, {reason}: expected it to be left out, got {{'x': 1}}"
        assert (caught.value.message, caught.value.param) == (expected, name)


@pytest.mark.parametrize("kind", BODIES)
def test_ignored_and_neutral_fields_leave_no_trace(kind: type[Fields]) -> None:
    plain = parse(kind, json.dumps(BODIES[kind]).encode())
    more = {name: {"x": 1} for name in kind.ignored} | {name: values[0] for name, values in kind.neutral.items()}
    more |= dict.fromkeys(set(kind.model_fields) - set(BODIES[kind]))
    assert plain.constraint() is None
    assert parse(kind, json.dumps({**BODIES[kind], **more}).encode()) == plain
    assert not set(kind.ignored) & set(kind.model_fields)


def test_text_is_no_format_with_a_grammar() -> None:
    asked = {**BODIES[CompletionRequest], "response_format": {"type": "text"}}
    assert parse(CompletionRequest, json.dumps(asked).encode()).constraint() is None


def conversation_of(*messages: dict[str, Any], reads_media: bool = False) -> Any:
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
            ],
        ),
    ],
)
def test_forms_of_messages(content: str, forms: list[dict[str, Any]]) -> None:
    """Names of speakers are ignored, refusals are text."""
    for form in forms:
        role = form["role"].replace("developer", "system")
        assert conversation_of(form) == ([{"role": role, "content": content}], [])


def test_forms_of_an_image() -> None:
    medium = Medium("image", "data:x", "messages[0].content[0].image_url.url")
    for form in ("data:x", {"url": "data:x", "detail": "high"}):
        found = conversation_of(
            {"role": "user", "content": [{"type": "image_url", "image_url": form}]}, reads_media=True
        )
        assert found == ([{"role": "user", "content": [{"type": "image"}]}], [medium])
