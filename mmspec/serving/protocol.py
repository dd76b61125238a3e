"""Requests of OpenAI's API, and vLLM's for tokens: fields and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model, field_validator, model_validator

from mmspec.checks import Rule, shown, whole
from mmspec.sampling.logprobs import LOGPROBS
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.syntax import JSON_SCHEMA, KINDS
from mmspec.serving.errors import APIError
from mmspec.serving.fields import MOST_ITEMS, Fields, checked
from mmspec.serving.limits import Limits
from mmspec.serving.messages import ChatMessage
from mmspec.serving.tool_use import CHOICE, Tool
from mmspec.targets.processor import is_token_ids

IGNORED = (
    *("user", "safety_identifier", "metadata", "service_tier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
NO_MODERATION = "the server does not moderate"
_STOP_STRINGS, _STOP_LENGTH = 16, 512


class StreamOptions(Fields):
    neutral: ClassVar = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
    include_usage: bool = False


class JSONSchema(Fields):
    ignored: ClassVar = ("name", "description", "strict")  # output is constrained strictly in any case
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
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


MAX_TOKENS, _MIN_TOKENS = SamplingParams.rule("max_new_tokens"), SamplingParams.rule("min_new_tokens")
_OTHERWISE = ("max_new_tokens", "min_new_tokens", "grammar_trigger", *KINDS)  # by fields of OpenAI's and vLLM's
_SAMPLING = [one.name for one in fields(SamplingParams) if one.name not in _OTHERWISE]
_Sampling = create_model(
    "_Sampling",
    __base__=Fields,
    **{name: (Annotated[Any, checked(name, SamplingParams.rule(name))], None) for name in _SAMPLING},  # type: ignore[call-overload]
)


class GenerationRequest(_Sampling):  # type: ignore[valid-type, misc]
    """Fields of all endpoints that generate: those of ``SamplingParams``, and some more.

    Attributes:
        limit_name: the endpoint's own name of ``max_tokens``.
    """

    limit_name: ClassVar[str] = "max_tokens"
    model: str
    n: int = Field(1, ge=1)
    max_tokens: Annotated[Any, checked("max_tokens", MAX_TOKENS)] = None
    min_tokens: Annotated[Any, checked("min_tokens", _MIN_TOKENS)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    t_max_predict_ms: Annotated[Any, checked("t_max_predict_ms", whole(0))] = 0

    @model_validator(mode="before")
    @classmethod
    def _one_limit(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get(cls.limit_name) is None:
            return given
        new, old = given[cls.limit_name], given.get("max_tokens")
        if old is not None and old != new:
            raise ValueError(f"max_tokens and {cls.limit_name} are one limit: got {shown(old)} and {shown(new)}")
        valid = isinstance(new, int) and MAX_TOKENS.holds(new)  # the field's own check reports other values
        return {**given, "max_tokens": new} if valid else given

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

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of ``Pipeline.stream`` beside ``params``."""
        return {"logprobs": self.alternatives, "max_time": self.t_max_predict_ms / 1000 or None}

    def params(self, limits: Limits, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters of the first choice, without ``constraint``, which takes long to check.

        More tokens than the server's limit are cut to it.

        Args:
            defaults: for fields that are left out.

        Raises:
            APIError: a value is beyond the server's limits.
        """
        if self.n > limits.max_running:
            raise APIError(400, f"n must be at most {limits.max_running}: got {self.n}", "n")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options goes with stream: true", "stream_options")
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        most = self.max_tokens or defaults.get("max_new_tokens", limits.max_tokens)
        given |= {"max_new_tokens": min(most, limits.max_tokens), "min_new_tokens": self.min_tokens}
        return SamplingParams(**given).over(defaults)

    def constraint(self) -> tuple[str, str] | None:
        """Kind and text of the grammar of the output, if any."""
        return None if self.response_format is None else self.response_format.constraint()


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    limit_name = "max_completion_tokens"
    # A prediction is for speed alone; responses are stored by /v1/responses only.
    ignored = (*IGNORED, "prediction", "reasoning_effort", "store", "verbosity")
    neutral: ClassVar = {"functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],)}
    refused: ClassVar = {
        "audio": "answers are text",
        "function_call": "tool_choice replaces it",
        "functions": "tools replaces it",
        "modalities": "answers are text",
        "moderation": NO_MODERATION,
        "web_search_options": "the server does not search",
    }
    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_ITEMS)
    max_completion_tokens: Annotated[Any, checked("max_completion_tokens", MAX_TOKENS)] = None
    logprobs: bool = False
    top_logprobs: Annotated[Any, checked("top_logprobs", LOGPROBS)] = None
    tools: list[Tool] = Field([], max_length=MOST_ITEMS)
    tool_choice: Annotated[Any, checked("tool_choice", CHOICE)] = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _with_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _as_prompts(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) or is_token_ids(given) else list(given)


def _are_prompts(given: Any) -> bool:
    prompts = _as_prompts(given) if isinstance(given, str | list) else []
    return 0 < len(prompts) <= MOST_ITEMS and all(isinstance(one, str) or is_token_ids(one) for one in prompts)


_PROMPTS = Rule(f"a text, token ids, or a list of 1 to {MOST_ITEMS} of them", _are_prompts, _as_prompts)


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    ignored = IGNORED
    neutral: ClassVar = {"best_of": (1,), "suffix": ("",)}
    refused: ClassVar = {
        "best_of": "choices are not ranked, n returns all of them",
        "suffix": "texts are continued at their end only",
    }
    prompt: Annotated[Any, checked("prompt", _PROMPTS)]
    logprobs: Annotated[Any, checked("logprobs", LOGPROBS)] = None
    echo: bool = False

    @model_validator(mode="after")
    def _without_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo does not go with logprobs, which are those of the output's tokens")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Fields):
    """``POST /tokenize``: a text, or a conversation as the chat template renders it."""

    neutral: ClassVar = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_ITEMS)
    tools: list[Tool] = Field([], max_length=MOST_ITEMS)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens goes with prompt: a chat template has its own")
        return self


class DetokenizeRequest(Fields):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
