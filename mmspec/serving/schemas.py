"""Request schemas of OpenAI's API and of vLLM's token endpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mmspec.errors import nearest, shown
from mmspec.sampling.params import Logprobs, MaxTokens, MinTokens, SamplingParams, SchemaText
from mmspec.sampling.syntax import KINDS
from mmspec.serving.errors import APIError
from mmspec.serving.media import Medium
from mmspec.serving.settings import Limits
from mmspec.targets.processor import is_token_ids
from mmspec.validation import check, condition, explain

MOST_ITEMS = 1024
"""Prompts, messages, parts of a message, or tools."""

_MOST_VALUES = 1_000_000  # in a body; commas and brackets inside strings count, too


class Fields(BaseModel):
    """Base of the objects in requests.

    An unimplemented field that would change the answer raises an error that names the field, and the reason for fields
    of OpenAI's schema, unless it has its neutral value. null means a field's default everywhere.

    Attributes:
        neutral: values without effect, by field; fields with these values are dropped.
        ignored: fields that are dropped.
        refused: reasons why fields of OpenAI's schema are not supported.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    ignored: ClassVar[Sequence[str]] = ()
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            return given
        given = cls.converted(dict(given))
        if info.context is not None:  # a set
            info.context.update(name for name in cls.ignored if given.get(name) is not None)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        left = {}
        for name, value in given.items():
            if value is None or name in cls.ignored or value in cls.neutral.get(name, ()):
                continue
            if name not in known:
                reason = f", {cls.refused[name]}" if name in cls.refused else ""
                hint = "" if reason else nearest(name, known)
                found = str(value).lower() if isinstance(value, bool) else shown(value)  # as in JSON
                about = f"{reason}: expected it to be left out, got {found}{hint}"
                raise PydanticCustomError("unsupported", "{field}{reason}", {"field": name, "reason": about})
            left[name] = value
        return left

    @classmethod
    def converted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Convert an object of another form, which may be modified and is not validated, to this form."""
        return given


class Variant(Fields):
    """A member of a union in a list, selected by its ``type``."""

    tags: ClassVar[set[str]] = set()
    """Types of all members: pydantic's locations of errors contain them after the index."""

    type: str

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        cls.tags.update(get_args(cls.model_fields["type"].annotation))


F = TypeVar("F", bound=Fields)


def parse(kind: type[F], body: bytes, ignored: Callable[[str], object] = str) -> F:
    """Parse a request body, and call ``ignored`` with the names of ignored fields. Takes long for large bodies. Raises
    ``APIError``: the body is not JSON, or a field is missing, unknown, of another type or out of range (the message
    names the first such field), or the body has too many values: parsing millions blocks all threads."""
    if (found := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > _MOST_VALUES:
        raise APIError(400, f"a request's body must have at most {_MOST_VALUES} values: got about {found}")
    try:
        given = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"the body must be JSON: {error}") from None
    try:
        asked = kind.model_validate(given, context=(dropped := set[str]()))
    except ValidationError as error:
        path, message = explain(error, "the body", tags=Variant.tags)
        raise APIError(400, message, path or None) from None
    for name in dropped:
        ignored(name)
    return asked


REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Names of an assistant's reasoning in messages: DeepSeek's name, and the name in current versions of vLLM."""

CACHE = ("cache_control", "prompt_cache_breakpoint")
"""Fields of parts, messages and tools that are ignored: all prefixes of prompts are kept."""


class _URL(Fields):
    ignored: ClassVar = ("detail",)  # the model's processor sets the resolution
    url: str


class TextPart(Variant):
    ignored: ClassVar = (*CACHE, "annotations", "citations", "logprobs")  # in answers that clients send back
    type: Literal["text"]
    text: str


class RefusalPart(Variant):
    """An assistant's refusal, treated as text of the conversation."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class MediaPart(Variant):
    """A part with an image or a video."""

    kind: ClassVar[Literal["image", "video"]]

    @property
    def source(self) -> str:
        given: _URL = getattr(self, f"{self.kind}_url")
        return given.url


class ImagePart(MediaPart):
    """An image; ``image_url`` may be the URL as a string."""

    ignored: ClassVar = (*CACHE, "detail")
    refused: ClassVar = {"file_id": "files are not uploaded, image_url may be a data URI"}
    kind = "image"
    type: Literal["image_url"]
    image_url: Annotated[_URL, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)]


class VideoPart(MediaPart):
    kind = "video"
    type: Literal["video_url"]
    video_url: _URL


Part = Annotated[TextPart | RefusalPart | ImagePart | VideoPart, Field(discriminator="type")]


class CalledFunction(Fields):
    """A call by the model; truncated arguments may be invalid JSON."""

    name: str
    arguments: str


class ToolCall(Fields):
    ignored: ClassVar = (*CACHE, "index", "caller")
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    """One message; string content means one text part, an assistant's content may be null or a refusal."""

    ignored: ClassVar[Sequence[str]] = CACHE
    refused: ClassVar = {"audio": "answers are text", "function_call": "tool_calls replaces it"}
    neutral: ClassVar = {"annotations": ([],), "tool_calls": ([],)}  # in answers that clients send back
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[Part],
        Field(max_length=MOST_ITEMS),
        BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given),
    ]
    tool_calls: list[ToolCall] | None = Field(None, max_length=MOST_ITEMS)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name of ``reasoning_content``

    @classmethod
    def converted(cls, given: dict[str, Any]) -> dict[str, Any]:
        refusal = given.pop("refusal", None) if given.get("role") == "assistant" else None
        if given.get("role") == "assistant" and given.get("content") is None:
            given["content"] = [] if refusal is None else refusal
        return given

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        of_assistants = ("tool_calls", "reasoning_content", "reasoning")
        for name, role in (*((name, "assistant") for name in of_assistants), ("tool_call_id", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise ValueError(f"{name} goes with the role {role}")
        return self

    @property
    def texts(self) -> list[str]:
        """All texts of the message that a chat template may render."""
        parts = [part.text for part in self.content if not isinstance(part, MediaPart)]
        called = [(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        return [*parts, *chain(*called), self.tool_call_id or "", self.name or "", self.reasoning_text or ""]

    @property
    def only_thinks(self) -> bool:
        """Whether the message has reasoning, and neither content nor calls."""
        return bool(self.reasoning_text) and not (self.content or self.tool_calls)

    @property
    def reasoning_text(self) -> str | None:
        return self.reasoning_content or self.reasoning

    def extras(self) -> dict[str, Any]:
        """Fields of a chat template's message other than role and content."""
        calls = [
            {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
            for call in self.tool_calls or ()
        ]
        name = self.name if self.role == "tool" else None  # the function's name; speaker names are ignored
        values: dict[str, Any] = dict.fromkeys((*REASONING_FIELDS, "thinking"), self.reasoning_text)  # gpt-oss' name
        values |= {"tool_calls": calls or None, "tool_call_id": self.tool_call_id, "name": name}
        return {name: value for name, value in values.items() if value is not None}


def conversation(given: Sequence[ChatMessage], reads_media: bool) -> tuple[list[dict[str, Any]], list[Medium]]:
    """Convert messages to transformers' format; also returns their images and videos in order. Only templates of models
    with ``reads_media`` take lists of parts."""
    messages, media = [], []
    names: dict[str, str] = {}  # function names by call id
    for place, message in enumerate(given):
        items: list[dict[str, Any]] = []
        for number, part in enumerate(message.content):
            if isinstance(part, MediaPart):
                path = f"messages[{place}].content[{number}].{part.kind}_url.url"
                media.append(Medium(part.kind, part.source, path))
                items.append({"type": part.kind})
            else:
                items.append({"type": "text", "text": part.text})
        content = items if reads_media else "\n".join(item.get("text", "") for item in items)
        role = "system" if message.role == "developer" else message.role
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        extras = message.extras()
        if message.tool_call_id in names:
            extras.setdefault("name", names[message.tool_call_id])  # some templates need it
        messages.append({"role": role, "content": content, **extras})
    return messages, media


FunctionName = Annotated[
    str,
    condition(
        "1 to 64 letters, digits, and any of _.-",
        lambda name: isinstance(name, str) and re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name) is not None,
    ),
]


class Function(Fields):
    # Arguments are constrained strictly in any case; tool search and programmatic calls are not supported.
    ignored: ClassVar[Sequence[str]] = (
        *(*CACHE, "strict", "allowed_callers", "async", "defer_loading", "output_schema"),
        *("eager_input_streaming", "input_examples"),
    )
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

    @property
    def declaration(self) -> dict[str, Any]:
        """The given fields among name, description and parameters."""
        return self.model_dump(include=set(Function.model_fields), exclude_none=True)


class Tool(Fields):
    type: Literal["function"]
    function: Function

    @property
    def declaration(self) -> dict[str, Any]:
        return self.function.declaration


def choice_of(form: str, *keys: str) -> PlainValidator:
    """Condition on ``tool_choice`` for one way of naming a function: an object with these keys, shown as ``form``."""

    def holds(value: Any) -> bool:
        if not isinstance(value, dict):
            return value in ("none", "auto", "required")
        return value.keys() == {*keys} and value["type"] == "function" and isinstance(named_function(value), str)

    return condition(f'"none", "auto", "required" or {form}', holds)


def named_function(choice: Any) -> str | None:
    """Function name of a ``tool_choice`` in the form of either API; None if it names no function."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


_ToolChoice = Annotated[Any, choice_of('{"type": "function", "function": {"name": NAME}}', "type", "function")]
IGNORED = (
    *("user", "safety_identifier", "metadata", "service_tier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    # Fields of other engines that affect only speed, memory, order or statistics.
    *("cache_prompt", "id_slot", "n_cache_reuse", "return_progress", "slot_id", "timings_per_token"),
    *("speculative.n_max", "speculative.n_min", "speculative.p_min"),
    *("keep_alive", "draft_model", "ttl", "priority", "request_id", "rid"),
)
"""Fields that change no answer."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("allowed_token_ids", "bad_words", "stop_token_ids"), ([],)),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "xtc_probability"), (0,)),
    **dict.fromkeys(("length_penalty", "repeat_penalty", "tfs_z", "typical_p", "typ_p"), (1,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
}
"""Values of other engines' sampling parameters that change no answer."""

NO_MODERATION = "the server does not moderate"
_STOP_STRINGS, _STOP_LENGTH = 16, 512


class StreamOptions(Fields):
    neutral: ClassVar = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


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


def grammar_of_format(kind: str, schema: dict[str, Any] | None) -> tuple[str, str] | None:
    """Kind and unchecked text of a response format's grammar; None for plain text. Raises ``UserError``: the schema is
    not JSON."""
    if kind == "text":
        return None
    return "json_schema", check("json_schema", SchemaText, {"type": "object"} if schema is None else schema)


_Speculative = Annotated[
    bool | str, condition("true, false or the name of a drafter", lambda value: isinstance(value, bool | str))
]
_SAMPLING: dict[str, Any] = {  # the other parameters are set by fields of OpenAI's and vLLM's APIs
    name: (one.rebuild_annotation(), Field(None))
    for name, one in SamplingParams.__pydantic_fields__.items()  # type: ignore[attr-defined]
    if name not in ("max_new_tokens", "min_new_tokens", "grammar_trigger", *KINDS)
}
_Sampling: Any = create_model("_Sampling", __base__=Fields, **_SAMPLING)


class GenerationRequest(_Sampling):
    """Fields of all generation endpoints: ``SamplingParams`` and further fields."""

    limit_name: ClassVar[str] = "max_tokens"  # the endpoint's own name of it
    model: str | None = None
    n: int = Field(1, ge=1)
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    speculative: _Speculative | None = None
    num_draft_tokens: NonNegativeInt | None = None
    t_max_predict_ms: NonNegativeInt = 0

    @model_validator(mode="after")
    def _one_limit(self) -> GenerationRequest:
        if self.max_tokens is not None and self.max_tokens != self.limit:
            both = f"{shown(self.max_tokens)} and {shown(self.limit)}"
            raise ValueError(f"max_tokens and {self.limit_name} are one limit: got {both}")
        return self

    @property
    def limit(self) -> int | None:
        own: int | None = getattr(self, self.limit_name)
        return self.max_tokens if own is None else own

    @field_validator("top_k", mode="before")
    @classmethod
    def _as_all(cls, top_k: Any) -> Any:
        """Convert -1, which disables top-k as in vLLM."""
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
    def usage_in(self) -> Literal["none", "last", "every"]:
        """Chunks of a stream that have ``usage``."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return "none"
        return "every" if self.stream_options.continuous_usage_stats else "last"

    @property
    def alternatives(self) -> int | None:
        """Requested top log probabilities per token; None if no log probabilities are requested."""
        return None

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of ``Pipeline.stream`` other than ``params``."""
        drafts = 0 if self.speculative is False else self.num_draft_tokens
        times = {"max_time": self.t_max_predict_ms / 1000 or None}
        return {"logprobs": self.alternatives, "num_draft_tokens": drafts, **times}

    def drafter(self, limits: Limits, names: Sequence[str]) -> str:
        """The name of the request's drafter. Raises ``APIError``: unknown drafter, or the server's limits allow no
        choice of drafter."""
        asked = self.speculative
        for name, value in (("speculative", asked), ("num_draft_tokens", self.num_draft_tokens)):
            if value is not None and limits.fixed_speculation:
                raise APIError(400, f"{name} is chosen by this server: expected none, got {shown(value)}", name)
        if isinstance(asked, str) and asked not in names:
            expected = ", ".join(("true", "false", *map(repr, names)))
            raise APIError(400, f"speculative must be one of {expected}: got {shown(asked)}", "speculative")
        if (given := self.num_draft_tokens or 0) > (most := 0 if asked is False else limits.max_draft_tokens):
            beside = " beside speculative: false" if asked is False else ""
            raise APIError(400, f"num_draft_tokens must be at most {most}{beside}: got {given}", "num_draft_tokens")
        return asked if isinstance(asked, str) else names[0]

    def sampling(self, limits: Limits, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``SamplingParams`` of the first choice, without ``constraint``, which takes long to check.

        ``max_tokens`` is clipped to the server's limit. Raises ``APIError``: a value exceeds the server's limits.
        """
        if self.n > limits.max_running:
            raise APIError(400, f"n must be at most {limits.max_running}: got {self.n}", "n")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options goes with stream: true", "stream_options")
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        most = self.limit or defaults.get("max_new_tokens", limits.max_tokens)
        given |= {} if self.min_tokens is None else {"min_new_tokens": self.min_tokens}
        return {**defaults, **given, "max_new_tokens": min(most, limits.max_tokens)}

    def constraint(self) -> tuple[str, str] | None:
        """Kind and text of the output's grammar; None for unconstrained output."""
        if (form := self.response_format) is None:
            return None
        return grammar_of_format(form.type, None if form.json_schema is None else form.json_schema.schema_)


class ChatCompletionRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    limit_name = "max_completion_tokens"
    # A prediction affects only speed; only /v1/responses stores responses.
    ignored: ClassVar[Sequence[str]] = (*IGNORED, "prediction", "store", "verbosity")
    neutral: ClassVar = {
        **NEUTRAL,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "include_reasoning": (True,),
        "modalities": (["text"],),
    }
    refused: ClassVar = {
        "audio": "answers are text",
        "function_call": "tool_choice replaces it",
        "functions": "tools replaces it",
        "modalities": "answers are text",
        "moderation": NO_MODERATION,
        "web_search_options": "the server does not search",
    }
    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_ITEMS)
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tools: list[Tool] = Field([], max_length=MOST_ITEMS)
    tool_choice: _ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _with_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _as_prompts(given: Any) -> list[Any]:
    prompts = [given] if isinstance(given, str) or is_token_ids(given) else given
    are_prompts = isinstance(prompts, list) and all(isinstance(one, str) or is_token_ids(one) for one in prompts)
    if not are_prompts or not 0 < len(prompts) <= MOST_ITEMS:
        raise PydanticCustomError("condition", f"a text, token ids, or a list of 1 to {MOST_ITEMS} of them")
    return prompts


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    ignored = IGNORED
    neutral: ClassVar = {**NEUTRAL, "best_of": (1,), "suffix": ("",)}
    refused: ClassVar = {"best_of": "choices are not ranked, n returns all of them"}
    prompt: Annotated[list[Any], PlainValidator(_as_prompts)]
    suffix: str | None = None
    parse_special: bool = True
    add_special_tokens: bool = True
    logprobs: Logprobs | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _without_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo does not go with logprobs, which are those of the output's tokens")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class ExtraFile(Fields):
    ignored: ClassVar = ("time",)
    text: str
    filename: str = "tmp"


class InfillRequest(GenerationRequest):
    """``POST /infill`` of llama.cpp, with one choice."""

    limit_name = "n_predict"
    ignored = (*IGNORED, "n_indent", "response_fields", "samplers", "t_max_prompt_ms")
    neutral: ClassVar = {**NEUTRAL, "n_predict": (-1,)}
    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field([], max_length=MOST_ITEMS)
    prompt: str = ""
    n: int = Field(1, ge=1, le=1)
    n_predict: MaxTokens | None = None


class TokenizeRequest(Fields):
    """``POST /tokenize``: a text, or a conversation rendered by the chat template."""

    neutral: ClassVar = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_ITEMS)
    tools: list[Tool] = Field([], max_length=MOST_ITEMS)
    chat_template_kwargs: dict[str, Any] = Field({})
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        if self.messages is not None and (self.add_special_tokens or self.parse_special):
            raise ValueError("add_special_tokens and parse_special go with prompt: a chat template has its own")
        return self


class DetokenizeRequest(Fields):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
