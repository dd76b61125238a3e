"""Requests of OpenAI's Responses API, and their translation into chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, field_validator, model_validator

from mmspec.checks import Rule
from mmspec.sampling.logprobs import LOGPROBS
from mmspec.sampling.params import SamplingParams
from mmspec.serving.fields import MOST_ITEMS, Fields, checked, validated
from mmspec.serving.messages import CACHE_BREAKPOINT, CalledFunction, VideoPart
from mmspec.serving.protocol import IGNORED, MAX_TOKENS, NO_MODERATION, ChatRequest, GenerationRequest, JSONSchema
from mmspec.serving.tool_use import CHOICE, Function

_LOGPROBS = "message.output_text.logprobs"
"""The value of ``include`` that asks for log probabilities."""


class _Text(Fields):
    ignored: ClassVar = ("annotations", "logprobs", CACHE_BREAKPOINT)  # the first two of answers that clients send back
    type: Literal["input_text", "output_text"]
    text: str

    def as_chat(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class _Image(Fields):
    ignored: ClassVar = ("detail", CACHE_BREAKPOINT)
    refused: ClassVar = {"file_id": "files are not uploaded, image_url may be a data URI"}
    type: Literal["input_image"]
    image_url: str

    def as_chat(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


class _Video(VideoPart):
    def as_chat(self) -> dict[str, Any]:
        return self.model_dump()


_Part = Annotated[_Text | _Image | _Video, Field(discriminator="type")]
_Content = Annotated[
    list[_Part],
    Field(max_length=MOST_ITEMS),
    BeforeValidator(lambda given: [{"type": "input_text", "text": given}] if isinstance(given, str) else given),
]


class Message(Fields):
    """A message of a user, the system or an assistant."""

    ignored: ClassVar = ("id", "status", "phase")
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class FunctionCall(CalledFunction):
    """A call of a function that the model made."""

    ignored: ClassVar = ("async", "id", "status", "caller", "namespace", "parsed_arguments")
    type: Literal["function_call"]
    call_id: str


class FunctionCallOutput(Fields):
    """The result of a call."""

    ignored: ClassVar = ("id", "status", "caller", "namespace", "name")
    type: Literal["function_call_output"]
    call_id: str
    output: _Content


Item = Annotated[Message | FunctionCall | FunctionCallOutput, Field(discriminator="type")]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Chat messages of items: calls belong to the assistant's message before them."""
    found: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, Message):
            found.append({"role": item.role, "content": [part.as_chat() for part in item.content]})
        elif isinstance(item, FunctionCallOutput):
            content = [part.as_chat() for part in item.output]
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            found[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    return found


class _FunctionType(Fields):
    type: Literal["function"]


class FunctionTool(Function, _FunctionType):
    """A function; chat requests have its fields one level deeper."""

    # There are no tool searches and programs beside calls; results are text.
    ignored: ClassVar = (*Function.ignored, "allowed_callers", "async", "defer_loading", "output_schema")


class _TextFormat(Fields):
    ignored: ClassVar = JSONSchema.ignored
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _check(self) -> _TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema goes with the type json_schema")
        return self

    def as_chat(self) -> dict[str, Any]:
        return {"type": self.type} | ({"json_schema": {"schema": self.schema_}} if self.schema_ is not None else {})


class _TextConfig(Fields):
    ignored: ClassVar = ("verbosity",)
    format: _TextFormat | None = None


def _deeper(choice: Any) -> Any:
    """A choice of tools in the form of chat requests."""
    if isinstance(choice, dict) and choice.keys() == {"type", "name"}:
        return {"type": choice["type"], "function": {"name": choice["name"]}}
    return choice


_CHOICE = Rule(
    '"none", "auto", "required" or {"type": "function", "name": NAME}', lambda value: CHOICE.holds(_deeper(value))
)


_OTHER_FORMAT = Rule("left out: it is text.format here", lambda value: value is None)


class ResponsesRequest(GenerationRequest):
    """``POST /v1/responses``."""

    limit_name = "max_output_tokens"
    ignored = (
        *(name for name in IGNORED if name not in ("metadata", "user")),
        *("access_programs", "image", "max_tool_calls", "reasoning"),
    )
    neutral: ClassVar = {"background": (False,), "truncation": ("disabled",)}
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
    input: Annotated[list[Item], Field(min_length=1, max_length=MOST_ITEMS)]
    instructions: str | None = None
    response_format: Annotated[Any, checked("response_format", _OTHER_FORMAT)] = None
    max_output_tokens: Annotated[Any, checked("max_output_tokens", MAX_TOKENS)] = None
    text: _TextConfig = _TextConfig()
    tools: list[FunctionTool] = Field([], max_length=MOST_ITEMS)
    tool_choice: Annotated[Any, checked("tool_choice", _CHOICE)] = "auto"
    parallel_tool_calls: bool = True
    include: list[str] = Field([])
    top_logprobs: Annotated[Any, checked("top_logprobs", LOGPROBS)] = None
    previous_response_id: str | None = None
    store: bool = True
    metadata: dict[str, str] = Field({})
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _as_items(cls, given: Any) -> Any:
        if isinstance(given, str):
            return [{"type": "message", "role": "user", "content": given}]
        if not isinstance(given, list):
            return given
        return [{"type": "message", **one} if isinstance(one, dict) and "role" in one else one for one in given]

    def as_chat(self, earlier: Sequence[Item]) -> ChatRequest:
        """The chat request that asks for the same, after the items of an earlier response.

        Raises:
            APIError: there are too many messages.
        """
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [{"type": "function", "function": one.model_dump(exclude={"type"})} for one in self.tools]
        own = {"n", "stream", "stream_options", "response_format"}
        logprobs = _LOGPROBS in self.include or self.top_logprobs is not None
        return validated(
            ChatRequest,
            self.model_dump(include=set(GenerationRequest.model_fields) - own, exclude_unset=True)
            | {
                "messages": [*system, *messages([*earlier, *self.input])],
                "response_format": self.text.format and self.text.format.as_chat(),
                "tools": tools,
                "tool_choice": _deeper(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
                "logprobs": logprobs,
                "top_logprobs": self.top_logprobs,
            },
        )

    def about(self, params: SamplingParams) -> dict[str, Any]:
        """Fields of the response that repeat the request's, or the values that stand for them."""
        form = {"type": "text"}
        if self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_none=True)
        given = self.model_dump(
            mode="json",
            include={
                *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id"),
                *("store", "tool_choice", "tools", "top_logprobs", "user"),
            },
        )
        values = {
            "temperature": params.temperature,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "truncation": "disabled",
        }
        return given | values | {"text": {"format": form}}
