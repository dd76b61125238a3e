"""Requests of OpenAI's API: fields, their limits, and those that are refused.

A field that would change the answer and is not implemented is refused and named, unless it has its neutral value. null
stands for a field's default everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from mmspec.checks import Rule, shown
from mmspec.sampling.logprobs import LOGPROBS
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.syntax import JSON_SCHEMA, KINDS
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits
from mmspec.serving.mistakes import translated

_IGNORED = ("user", "safety_identifier", "prompt_cache_key", "metadata")  # change nothing in the answer
_STOP_STRINGS, _STOP_LENGTH = 16, 512
_MOST_ITEMS = 1024  # messages, and parts of a message
_TEMPERATURE = 1.0  # OpenAI's default


class _Fields(BaseModel):
    """Base of the request's objects.

    Attributes:
        neutral: values by field that ask for nothing; such fields are dropped.
        ignored: fields that are dropped.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    ignored: ClassVar[Sequence[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in cls.ignored and value not in cls.neutral.get(name, ())
        }


class _URL(_Fields):
    neutral = {"detail": ("auto",)}
    url: str


class TextPart(_Fields):
    type: Literal["text"]
    text: str


class ImagePart(_Fields):
    type: Literal["image_url"]
    image_url: _URL


class VideoPart(_Fields):
    type: Literal["video_url"]
    video_url: _URL


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class ChatMessage(_Fields):
    """One message; a text as content is one text part."""

    neutral = {"annotations": ([],), "tool_calls": ([],)}  # of answers that clients send back
    role: Literal["system", "developer", "user", "assistant"]
    content: list[Part] = Field(max_length=_MOST_ITEMS)

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content


class StreamOptions(_Fields):
    neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
    include_usage: bool = False


class JSONSchema(_Fields):
    ignored = ("name", "description", "strict")  # output is constrained strictly in any case
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self

    def constraint(self) -> tuple[str, str] | None:
        """Kind and text of the grammar of the output, if any; the grammar is not checked yet.

        Raises:
            UserError: it is no JSON.
        """
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else {"type": "object"}
        return "json_schema", JSON_SCHEMA.check("json_schema", schema)


def _checked(name: str, rule: Rule) -> AfterValidator:
    """Checks a field as the Python API does, with its message."""
    return AfterValidator(partial(rule.check, name))


_MAX_TOKENS, _MIN_TOKENS = SamplingParams.rule("max_new_tokens"), SamplingParams.rule("min_new_tokens")
_OTHERWISE = ("max_new_tokens", "min_new_tokens", *KINDS)  # by fields of OpenAI's and vLLM's
_SAMPLING = [one.name for one in fields(SamplingParams) if one.name not in _OTHERWISE]
_Sampling = create_model(
    "_Sampling",
    __base__=_Fields,
    **{name: (Annotated[Any, _checked(name, SamplingParams.rule(name))], None) for name in _SAMPLING},  # type: ignore[call-overload]
)


class _Request(_Sampling):  # type: ignore[valid-type, misc]
    """Fields that both endpoints have: those of ``SamplingParams``, and"""

    model: str
    n: int = Field(1, ge=1)
    max_tokens: Annotated[Any, _checked("max_tokens", _MAX_TOKENS)] = None
    min_tokens: Annotated[Any, _checked("min_tokens", _MIN_TOKENS)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("top_k", mode="before")
    @classmethod
    def _as_all(cls, top_k: Any) -> Any:
        """-1 disables it, as in vLLM."""
        return 0 if top_k == -1 else top_k

    @field_validator("stop")
    @classmethod
    def _short(cls, stop: str | list[str]) -> str | list[str]:
        texts = [stop] if isinstance(stop, str) else stop
        if len(texts) > _STOP_STRINGS or any(len(text) > _STOP_LENGTH for text in texts):
            limits = f"at most {_STOP_STRINGS} texts of at most {_STOP_LENGTH} characters"
            raise ValueError(f"expected {limits}, got {shown(stop)}")
        return stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def alternatives(self) -> int | None:
        """Alternatives per token whose log probabilities are asked for; None if no log probabilities are."""
        raise NotImplementedError

    def params(self, limits: Limits, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters of the first choice, without ``constraint``, which takes long to check.

        Args:
            limits: of the server.
            defaults: the model's, for fields that are left out.

        Raises:
            APIError: a value is beyond the server's limits.
        """
        if self.max_tokens is not None and self.max_tokens > limits.max_tokens:
            message = f"max_tokens must be at most {limits.max_tokens}: got {self.max_tokens}"
            raise APIError(400, message, "max_tokens")
        if self.n > limits.max_running:
            raise APIError(400, f"n must be at most {limits.max_running}: got {self.n}", "n")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options goes with stream: true", "stream_options")
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        given |= {"max_new_tokens": self.max_tokens, "min_new_tokens": self.min_tokens}
        unset = {"temperature": _TEMPERATURE, "max_new_tokens": limits.max_tokens, **defaults}
        unset["max_new_tokens"] = min(unset["max_new_tokens"], limits.max_tokens)
        return SamplingParams(**given).over(unset)

    def constraint(self) -> tuple[str, str] | None:
        """Kind and text of the grammar of the output, if any."""
        return None


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    ignored = _IGNORED
    neutral: ClassVar = {
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }
    messages: list[ChatMessage] = Field(min_length=1, max_length=_MOST_ITEMS)
    max_completion_tokens: Annotated[Any, _checked("max_completion_tokens", _MAX_TOKENS)] = None
    logprobs: bool = False
    top_logprobs: Annotated[Any, _checked("top_logprobs", LOGPROBS)] = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_limit(cls, given: Any) -> Any:
        """``max_tokens`` is the old name of ``max_completion_tokens``."""
        if not isinstance(given, dict) or given.get("max_completion_tokens") is None:
            return given
        new, old = given["max_completion_tokens"], given.get("max_tokens")
        if old is not None and old != new:
            raise ValueError(f"max_tokens and max_completion_tokens are one limit: got {shown(old)} and {shown(new)}")
        return {**given, "max_tokens": new}

    @model_validator(mode="after")
    def _with_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def constraint(self) -> tuple[str, str] | None:
        return None if self.response_format is None else self.response_format.constraint()


class CompletionRequest(_Request):
    """``POST /v1/completions``."""

    ignored = _IGNORED
    neutral: ClassVar = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
    prompt: list[str] = Field(min_length=1, max_length=_MOST_ITEMS)
    logprobs: Annotated[Any, _checked("logprobs", LOGPROBS)] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_prompts(cls, prompt: Any) -> Any:
        return [prompt] if isinstance(prompt, str) else prompt

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


R = TypeVar("R", bound=_Request)


def parse(kind: type[R], body: bytes) -> R:
    """Parse a request's body.

    Raises:
        APIError: it is no JSON, or a field is missing, unknown, of another type or out of range; the first such field
            is named.
    """
    try:
        given = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"the body must be JSON: {error}") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        message, param = translated(error.errors(include_url=False)[0], given, kind)
        raise APIError(400, message, param) from None
