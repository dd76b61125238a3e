"""OpenAI's Responses API: requests, conversion of items to chat messages, responses, events, stored responses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from mmspec.pipeline import Piece
from mmspec.sampling.params import LIBRARY, Logprobs, MaxTokens
from mmspec.serving.errors import APIError
from mmspec.serving.formats import ChatFormat
from mmspec.serving.schemas import (
    CACHE,
    IGNORED,
    MOST_ITEMS,
    NEUTRAL,
    NO_MODERATION,
    ChatMessage,
    Fields,
    Function,
    GenerationRequest,
    JSONSchema,
    TextPart,
    choice_of,
    grammar_of_format,
)
from mmspec.validation import condition

_LOGPROBS = "message.output_text.logprobs"
"""The value of ``include`` that asks for log probabilities."""


_PARTS = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
"""Types of parts, and their types in chat messages."""


def _parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    kinds = [one.get("type") if isinstance(one, dict) else None for one in content]
    return [
        {**one, "type": _PARTS[kind]} if kind in tuple(_PARTS) else one
        for one, kind in zip(content, kinds, strict=True)
    ]


class Item(ChatMessage):
    """A message, a call, its result or reasoning, converted to a chat message."""

    ignored: ClassVar = (
        *(*CACHE, "id", "status", "phase", "summary", "encrypted_content"),
        *("async", "caller", "namespace", "parsed_arguments"),
    )

    @classmethod
    def converted(cls, item: dict[str, Any]) -> dict[str, Any]:
        kind = item.pop("type", "message")
        if kind == "message":
            return super().converted({**item, "content": _parts(item.get("content"))})
        if kind == "function_call":
            name, arguments, call_id = (item.pop(field, None) for field in ("name", "arguments", "call_id"))
            call = {"id": call_id, "function": {"name": name, "arguments": arguments}}
            return {**item, "role": "assistant", "content": [], "tool_calls": [call]}
        if kind == "function_call_output":
            result = {"tool_call_id": item.pop("call_id", None), "content": _parts(item.pop("output", None))}
            return {**item, "role": "tool", **result}
        if kind != "reasoning":
            expected = "'message', 'function_call', 'function_call_output', 'reasoning'"
            raise PydanticCustomError("union_tag_invalid", "", {"expected_tags": expected})
        try:
            text = "".join(part["text"] for part in item.pop("content", None) or ())
        except (TypeError, LookupError):
            raise ValueError("the content of reasoning must be a list of parts with a text") from None
        return {**item, "role": "assistant", "content": [], "reasoning_content": text}


ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def chat_messages(items: Sequence[Item], instructions: str | None = None) -> list[ChatMessage]:
    """Convert validated items to chat messages.

    Calls join the preceding assistant message, reasoning joins the following one. Raises ``APIError``: too many
    messages.
    """
    system = [TextPart.model_construct(type="text", text=instructions)]
    found = [ChatMessage.model_construct(role="system", content=system)] if instructions else []
    for item in items:
        last = found[-1] if found and found[-1].role == item.role == "assistant" else None
        if last is not None and (item.tool_calls or (last.only_thinks and not item.only_thinks)):
            calls = [*(last.tool_calls or ()), *(item.tool_calls or ())] or None
            found[-1] = last.model_copy(update={"content": [*last.content, *item.content], "tool_calls": calls})
        elif item.reasoning_content != "":
            found.append(item)
    if len(found) > MOST_ITEMS:
        raise APIError(400, f"messages must be a list of at most {MOST_ITEMS}: got {len(found)}", "input")
    return found


class _FunctionType(Fields):
    type: Literal["function"]


class FunctionTool(Function, _FunctionType):  # the type is checked first
    """A function declaration; chat requests nest these fields under ``function``."""


class _TextFormat(JSONSchema):
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check(self) -> _TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema goes with the type json_schema")
        return self


class _TextConfig(Fields):
    ignored: ClassVar = ("verbosity",)
    format: _TextFormat | None = None


_ToolChoice = Annotated[Any, choice_of('{"type": "function", "name": NAME}', "type", "name")]


class _ReasoningConfig(Fields):
    # The reasoning itself is sent, not a summary.
    ignored: ClassVar = ("context", "generate_summary", "mode", "summary")
    effort: str | None = None


class ResponsesRequest(GenerationRequest):
    """``POST /v1/responses``."""

    limit_name = "max_output_tokens"
    ignored = (
        *(name for name in IGNORED if name not in ("metadata", "user")),
        *("access_programs", "image", "max_tool_calls"),
    )
    neutral: ClassVar = {**NEUTRAL, "background": (False,), "truncation": ("disabled",)}
    refused: ClassVar = {
        "background": "clients wait for their responses",
        "background_options": "clients wait for their responses",
        "context_management": "conversations are not shortened",
        "conversation": "previous_response_id goes on with a conversation",
        "moderation": NO_MODERATION,
        "prompt": "prompts are not stored, instructions and input contain them",
        "truncation": "conversations are not shortened",
    }
    n: Literal[1] = 1
    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MOST_ITEMS),
        BeforeValidator(lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given),
    ]
    instructions: str | None = None
    response_format: Annotated[Any, condition("left out: it is text.format here", lambda value: value is None)] = None
    max_output_tokens: MaxTokens | None = None
    text: _TextConfig = _TextConfig()
    tools: list[FunctionTool] = Field([], max_length=MOST_ITEMS)
    tool_choice: _ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})
    reasoning: _ReasoningConfig = _ReasoningConfig()
    include: list[str] = Field([])
    top_logprobs: Logprobs | None = None
    previous_response_id: str | None = None
    store: bool = True
    metadata: dict[str, str] = Field({})
    user: str | None = None

    @property
    def reasoning_effort(self) -> str | None:
        return self.reasoning.effort

    @property
    def alternatives(self) -> int | None:
        asked = _LOGPROBS in self.include or self.top_logprobs is not None
        return (self.top_logprobs or 0) if asked else None

    def constraint(self) -> tuple[str, str] | None:
        form = self.text.format
        return None if form is None else grammar_of_format(form.type, form.schema_)

    def about(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Response fields that echo the request, with the defaults of ``sampling``: fields of ``SamplingParams``."""
        form = self.text.format or _TextFormat(type="text", schema=None)
        given = self.model_dump(
            mode="json",
            include={
                *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id"),
                *("reasoning", "store", "tool_choice", "tools", "top_logprobs", "user"),
            },
        )
        values = {
            "temperature": sampling.get("temperature", LIBRARY["temperature"]),
            "top_p": sampling.get("top_p", LIBRARY["top_p"]),
            "truncation": "disabled",
        }
        return given | values | {"text": {"format": form.model_dump(by_alias=True, exclude_none=True)}}


Event = dict[str, Any]

_WRITTEN: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
    "message": ("msg", {"role": "assistant"}, {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}),
}
"""Prefix of ids, fields and content of items of text."""


class ResponsesFormat(ChatFormat):
    """``response`` objects, whose output is reasoning, messages and function calls, and their stream events.

    The whole response is built from the stream events.

    Args:
        about: response fields known before generation.
        store: called with the whole response; None does not store it.
    """

    prefix, end = "resp_", b""

    def __init__(
        self, *common: Any, about: Mapping[str, Any], store: Callable[[dict[str, Any]], None] | None, **keywords: Any
    ) -> None:
        super().__init__(*common, **keywords)
        self._store = store
        self._about = dict(about)
        self._output: list[dict[str, Any]] = []
        self._growing: Any = None  # the last item while it is incomplete
        self._number = 0  # sequence number of the next event

    def whole(self) -> dict[str, Any]:
        for _ in self._grow(self.choices[0]):
            pass
        return self._ended()

    def first_chunks(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def chunks(self, index: int, piece: Piece) -> Iterator[Event]:
        self.add(index, piece)
        yield from self._grow(piece)
        if piece.finish_reason is not None:
            response = self._ended()
            yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: APIError) -> Iterator[Event]:
        about = {"code": "server_error", "message": error.message}
        yield self._event("response.failed", response=self._response("failed") | {"error": about})

    def _ended(self) -> dict[str, Any]:
        figures = self._figures()
        usage = figures["usage"]
        figures["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        response = self._response(self._status()) | figures
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._store is not None:
            self._store(response)
        return response

    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self._head["id"], "object": "response", "created_at": self._head["created"], "status": status}
        none = {"background": False, "error": None, "incomplete_details": None, "usage": None}
        return {**head, "model": self._head["model"], **none, **self._about, "output": [*self._output]}

    def _grow(self, piece: Piece) -> Iterator[Event]:
        """Events for new output, with the final events if the answer has ended; log probabilities exclude reasoning."""
        final, delta = piece.finish_reason is not None, self._read(0, piece)
        if delta.reasoning:
            yield from self._write("reasoning", delta.reasoning)
        last = self._growing["type"] if self._growing else None if self._output else "message"
        if delta.content or (final and not delta.calls and last == "message"):  # an end of sequence, or no output
            logprobs = piece.logprobs[piece.num_reasoning_tokens :]
            found = (self._logprobs_of(logprobs, self.choices[0]) or {}).get("content", [])
            yield from self._write("message", delta.content, logprobs=found)
        for call in delta.calls.values():
            yield from self._call(call)
        if final:
            yield from self._close(self._status())

    def _write(self, kind: str, text: str, **lists: list[Any]) -> Iterator[Event]:
        """Events that append text to a reasoning item or a message, and entries to its ``lists``."""
        prefix, fields, part = _WRITTEN[kind]
        if not self._growing or self._growing["type"] != kind:
            yield from self._open(prefix, {"type": kind, **deepcopy(fields), "content": []})
            part = deepcopy(part)
            yield self._item_event("response.content_part.added", content_index=0, part=deepcopy(part))
            self._growing["content"].append(part)
        (part,) = self._growing["content"]
        part["text"] += text
        for name, more in lists.items():
            part[name] += more
        if text:
            yield self._item_event(f"response.{part['type']}.delta", content_index=0, delta=text, **lists)

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            names = {"call_id": call["id"], "name": function["name"]}
            yield from self._open("fc", {"type": "function_call", **names, "arguments": ""})
        if arguments := function["arguments"]:
            self._growing["arguments"] += arguments
            yield self._item_event("response.function_call_arguments.delta", delta=arguments)

    def _open(self, prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self._growing = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        self._output.append(self._growing)
        first = self._growing | ({"content": []} if "content" in fields else {})
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=first)

    def _close(self, status: str) -> Iterator[Event]:
        if (item := self._growing) is None:
            return
        item["status"] = status
        if "content" in item:
            (part,) = item["content"]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._item_event(f"response.{part['type']}.done", content_index=0, **done)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._growing = None

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._growing["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


_STORED_BYTES = 256 << 20


@dataclass(frozen=True)
class _Stored:
    response: dict[str, Any]
    items: Sequence[Item]
    size: int
    time: float


class StoredResponses:
    """In-memory store of responses and their conversations. Thread-safe.

    Args:
        most: maximum number of responses; the oldest is dropped. All texts together take at most 256 MiB.
        seconds: time to live of a response.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._kept: dict[str, _Stored] = {}  # oldest first
        self._lock = Lock()

    def add(self, response: dict[str, Any], asked: Sequence[Item]) -> None:
        """Store a response and its conversation: the items ``asked`` and its output, without truncated calls."""
        answered = [one for one in response["output"] if one["type"] != "function_call" or one["status"] == "completed"]
        items = [*asked, *ITEMS.validate_python(answered)]
        size = len(json.dumps(response)) + len(ITEMS.dump_json(items))
        with self._lock:
            self._kept[response["id"]] = _Stored(response, items, size, time.monotonic())
            self._trim()

    def items(self, name: str | None) -> Sequence[Item]:
        """The conversation up to and including a response; empty if ``name`` is None. Raises ``APIError``: status 400,
        the response is not stored."""
        if name is None:
            return ()
        message = f"previous_response_id must be that of a response which the server keeps: got {name[:80]!r}"
        return self._find(name, APIError(400, message, "previous_response_id", "previous_response_not_found")).items

    def get(self, name: str) -> dict[str, Any]:
        """Return a stored response. Raises ``APIError``: status 404, the response is not stored."""
        error = APIError(404, f"no response of this id is kept: got {name[:80]!r}", "response_id")
        return self._find(name, error).response

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a response; returns OpenAI's deletion object. Raises ``APIError``: status 404, the response is not
        stored."""
        self.get(name)
        with self._lock:
            self._kept.pop(name, None)
        return {"id": name, "object": "response", "deleted": True}

    def _find(self, name: str, missing: APIError) -> _Stored:
        with self._lock:
            self._trim()
            if name not in self._kept:
                raise missing
            return self._kept[name]

    def _trim(self) -> None:
        oldest = time.monotonic() - self._seconds
        while self._kept:
            name, first = next(iter(self._kept.items()))
            size = sum(kept.size for kept in self._kept.values())
            if len(self._kept) <= self._most and size <= _STORED_BYTES and first.time >= oldest:
                return
            del self._kept[name]
