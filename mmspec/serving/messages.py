"""Anthropic's Messages API: requests, conversion of blocks to chat messages, responses and events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from mmspec.pipeline import Piece
from mmspec.sampling.params import MaxTokens
from mmspec.serving.formats import ChatFormat
from mmspec.serving.schemas import (
    IGNORED,
    MOST_ITEMS,
    NEUTRAL,
    CalledFunction,
    ChatMessage,
    Fields,
    Function,
    FunctionName,
    GenerationRequest,
    MediaPart,
    TextPart,
    ToolCall,
    Variant,
    as_parts,
    choice_of,
    grammar_of_format,
)
from mmspec.targets.processor import called_arguments

_CACHE = "cache_control"
"""Field that is ignored everywhere: all prefixes of prompts are kept."""


class _Text(TextPart):
    ignored: ClassVar = (_CACHE, "citations")
    type: Literal["text"]


class _Source(Fields):
    ignored: ClassVar = ("media_type",)  # files are recognised by their content
    type: Literal["base64", "url"]
    data: str = ""
    url: str = ""


class _Image(MediaPart):
    ignored: ClassVar = (_CACHE,)
    kind = "image"
    type: Literal["image"]
    image: _Source = Field(alias="source")

    @property
    def source(self) -> str:
        return self.image.url if self.image.type == "url" else f"data:image/any;base64,{self.image.data}"


class _Thinking(Variant):
    ignored: ClassVar = ("signature",)
    type: Literal["thinking"]
    thinking: str


class _Redacted(Variant):
    ignored: ClassVar = ("data",)
    type: Literal["redacted_thinking"]


class _ToolUse(Variant):
    ignored: ClassVar = (_CACHE, "caller")
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_Parts = Annotated[list[Annotated[_Text | _Image, Field(discriminator="type")]], as_parts("text")]


class _ToolResult(Variant):
    ignored: ClassVar = (_CACHE, "is_error")  # the content tells of the error
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Parts = Field([], max_length=MOST_ITEMS)


_Block = Annotated[_Text | _Image | _Thinking | _Redacted | _ToolUse | _ToolResult, Field(discriminator="type")]


class Message(Fields):
    """A message of blocks; a text is one block."""

    role: Literal["user", "assistant"]
    content: Annotated[list[_Block], Field(max_length=MOST_ITEMS), as_parts("text")]

    def turns(self) -> Iterator[ChatMessage]:
        """The results of calls, a message each, and a message of the other blocks."""
        message, parts, calls, thoughts = ChatMessage.model_construct, list[Any](), list[ToolCall](), ""
        for block in self.content:
            if isinstance(block, _ToolResult):
                yield message(role="tool", tool_call_id=block.tool_use_id, content=block.content)
            elif isinstance(block, _ToolUse):
                function = CalledFunction.model_construct(name=block.name, arguments=json.dumps(block.input))
                calls.append(ToolCall.model_construct(id=block.id, function=function))
            elif isinstance(block, _Thinking):
                thoughts += block.thinking
            elif not isinstance(block, _Redacted):
                parts.append(block)
        if parts or calls or thoughts:
            own = {"tool_calls": calls or None, "reasoning_content": thoughts or None}
            yield message(role=self.role, content=parts, **own)


class _Tool(Fields):
    ignored: ClassVar = (
        _CACHE,
        "strict",
        "eager_input_streaming",
        "input_examples",
        "defer_loading",
        "allowed_callers",
    )
    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]

    @property
    def declaration(self) -> dict[str, Any]:
        function = Function(name=self.name, description=self.description, parameters=self.input_schema)
        return function.declaration


class _ThinkingConfig(Fields):
    ignored: ClassVar = ("budget_tokens", "display")  # max_tokens counts reasoning, too
    type: Literal["enabled", "adaptive", "disabled"]


class _OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Fields):
    effort: str | None = None
    format: _OutputFormat | None = None


class MessagesRequest(GenerationRequest):
    """``POST /v1/messages``, and ``POST /v1/messages/count_tokens``."""

    # Contexts are edited on request of agents, to save tokens.
    ignored = (*IGNORED, _CACHE, "container", "context_management", "diagnostics", "inference_geo", "speed")
    neutral: ClassVar = {**NEUTRAL, "mcp_servers": ([],)}
    refused: ClassVar = {"mcp_servers": "the client makes the calls"}
    n: Literal[1] = 1
    max_tokens: MaxTokens | None = None
    messages: list[Message] = Field(min_length=1, max_length=MOST_ITEMS)
    system: Annotated[list[_Text], as_parts("text")] = Field([], max_length=MOST_ITEMS)
    tools: list[_Tool] = Field([], max_length=MOST_ITEMS)
    tool_choice: Annotated[Any, choice_of('{"type": "auto", "any", "none" or "tool"}', "type", "name")] = "auto"
    parallel_tool_calls: bool = True
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig = _OutputConfig()

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        """Give the fields of the tool choice and the stop strings the names of OpenAI's API."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        if (stop := given.pop("stop_sequences", None)) is not None:
            given["stop"] = stop
        if isinstance(choice := given.get("tool_choice"), dict):
            choice = dict(choice)
            given["parallel_tool_calls"] = not choice.pop("disable_parallel_tool_use", False)
            names = {"auto": "auto", "any": "required", "none": "none"}
            kind = choice.get("type")
            given["tool_choice"] = {**choice, "type": "function"} if kind == "tool" else names.get(str(kind), choice)
        return given

    @property
    def turns(self) -> list[ChatMessage]:
        system = [ChatMessage.model_construct(role="system", content=self.system)] if self.system else []
        return [*system, *(turn for message in self.messages for turn in message.turns())]

    @property
    def reasoning_effort(self) -> str | None:
        return "none" if self.thinking and self.thinking.type == "disabled" else self.output_config.effort

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        return {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else {}

    def constraint(self) -> tuple[str, str] | None:
        form = self.output_config.format
        return None if form is None else grammar_of_format(form.type, form.schema_)


Event = dict[str, Any]

_OPENED: Mapping[str, Mapping[str, Any]] = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
"""Fields of new blocks of text."""


class MessagesFormat(ChatFormat):
    """``message`` objects, whose content is blocks of thinking, text and calls, and their stream events."""

    prefix, end, api = "msg_", b"", "/v1/messages"

    def __init__(self, *common: Any, **keywords: Any) -> None:
        super().__init__(*common, **keywords)
        self._blocks: list[dict[str, Any]] = []

    def whole(self) -> dict[str, Any]:
        for _ in self._grow(self.choices[0]):
            pass
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = called_arguments(block["input"])
        return {**self._message(), "content": self._blocks, **self._ended(), "metrics": self._figures()["metrics"]}

    def first_chunks(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message()}
        yield {"type": "ping"}

    def chunks(self, index: int, piece: Piece) -> Iterator[Event]:
        self.add(index, piece)
        yield from self._grow(piece)
        if piece.finish_reason is not None:
            ended = self._ended()
            usage = ended.pop("usage")
            yield {"type": "message_delta", "delta": ended, "usage": usage, "metrics": self._figures()["metrics"]}
            yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        none = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        return {**head, "content": [], **none}

    def _ended(self) -> dict[str, Any]:
        choice, usage = self.choices[0], self._figures()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(str(self._finish_reason(0)), "end_turn")
        counts = {
            "input_tokens": usage["prompt_tokens"] - cached,  # both add up in Anthropic's API
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }
        stop = choice.stop_string
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop, "usage": counts}

    def _grow(self, piece: Piece) -> Iterator[Event]:
        """Events for new output, with the last block's end if the answer has ended."""
        delta = self._read(0, piece)
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if text:
                if not self._blocks or self._blocks[-1]["type"] != kind:
                    yield from self._open({"type": kind, **_OPENED[kind]})
                yield self._delta_event(kind, kind, text)
        for call in delta.calls.values():
            function = call["function"]
            if "id" in call:
                yield from self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
                self._blocks[-1]["input"] = ""
            if function["arguments"]:
                yield self._delta_event("input_json", "input", function["arguments"])
        if piece.finish_reason is not None:
            yield from self._close()

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta_event(self, kind: str, field: str, text: str) -> Event:
        self._blocks[-1][field] += text
        name = "partial_json" if field == "input" else field
        delta = {"type": f"{kind}_delta", name: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
