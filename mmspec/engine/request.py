"""Validation of requests, before any file is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from mmspec.errors import Attempt, UserError, nearest, raising, shown
from mmspec.sampling.params import Logprobs, SamplingParams
from mmspec.sampling.processors import TreeProcessor
from mmspec.sampling.reasoning import ReasoningName
from mmspec.targets.processor import is_token_ids
from mmspec.validation import Text, check, condition, options

F = TypeVar("F", bound=Callable[..., Any])

_KEYS = ("prompt", "images", "videos", "params")
_ELSEWHERE = {  # names in transformers' generate and OpenAI's API
    "stop_strings": "stop",
    "max_length": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_length": "min_new_tokens",
    "do_sample": "temperature, where 0 is greedy,",
    "response_format": "json_schema",
    "messages": "prompt",
    "input_ids": "prompt",
    "image": "images",
    "video": "videos",
    "n": "several requests of generate_batch",
    "num_return_sequences": "several requests of generate_batch",
    "stream": "Pipeline.stream",
    "streamer": "Pipeline.stream",
    "assistant_model": "drafter= of mmspec.load",
}


def _is_processor(value: Any) -> bool:
    return not isinstance(value, type) and (callable(value) or isinstance(value, TreeProcessor))


def _are(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, Sequence) and all(map(holds, values))


_Params = Annotated[Any, condition("mmspec.SamplingParams", lambda value: isinstance(value, SamplingParams))]
Functions = Annotated[Sequence[Any], condition("a list of callables", _are(callable))]
Processors = Annotated[Sequence[Any], condition("a list of logits processors", _are(_is_processor))]


@options
class DecodeOptions:
    """Decoding options shared by all requests of a call.

    Attributes:
        num_draft_tokens: draft tokens per step, the size of the trees; None chooses adaptively. ``nodes`` is an alias.
        logits_processor: as for transformers' ``generate``, or tree processors.
        stopping_criteria: as for transformers' ``generate``.
        trace: record the verified trees.
        logprobs: number of alternatives per token, at most 20, whose log probabilities are recorded alongside the
            token's, before logits processors and sampling parameters; None records none.
        chat_template: render prompts with the model's chat template if it has one; False uses text prompts as is.
        max_time: seconds after the first token, when the answer ends with finish reason ``"length"``; None: no limit.
        reasoning: format of the reasoning before an answer (``mmspec.sampling.reasoning``). Reasoning is returned
            separately, and grammars, triggers and stop strings start after it. ``"auto"`` uses the chat template's
            format; None makes reasoning a part of the answer.
        adapter: name of a LoRA adapter of ``mmspec.load(adapters=...)``; None for the model without one.
        context_limit: maximum length of prompt plus output if it is below the model's; None for the model's.
        stop_token_ids: tokens that end the answer in addition to the model's, and are left out of its text.
        text_tokens: names of special tokens that are text in the answer and in its grammar.
    """

    num_draft_tokens: NonNegativeInt | None = None
    logits_processor: Processors = ()
    stopping_criteria: Functions = ()
    trace: bool = False
    logprobs: Logprobs | None = None
    chat_template: bool = True
    max_time: NonNegativeFloat | None = None
    reasoning: ReasoningName | None = None
    adapter: Text | None = None
    context_limit: PositiveInt | None = None
    stop_token_ids: Sequence[NonNegativeInt] = ()
    text_tokens: Sequence[str] = ()


class GenerateKeywords(TypedDict, total=False):
    """Keywords of ``Pipeline.generate``: ``params`` or fields of ``SamplingParams``, fields of ``DecodeOptions``, and
    options of the processor's ``encode`` for text, images and videos."""

    params: SamplingParams | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    seed: int | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    min_new_tokens: int | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Any | None
    grammar_trigger: str | None
    ignore_eos: bool
    grammar_aligned: bool
    lossy: float
    num_draft_tokens: int | None
    nodes: int | None
    logits_processor: Sequence[Any]
    stopping_criteria: Sequence[Any]
    trace: bool
    logprobs: int | None
    chat_template: bool
    max_time: float | None
    reasoning: str | None
    adapter: str | None
    context_limit: int | None
    stop_token_ids: Sequence[int]
    text_tokens: Sequence[str]
    tools: Sequence[Mapping[str, Any]] | None
    answer_start: str
    chat_template_kwargs: Mapping[str, Any] | None
    parse_special: bool
    frames: int | None
    fps: float | None
    video_backend: Literal["pyav", "decord"]


def shows_keywords(function: F) -> F:
    """Decorator that makes ``help`` and ``inspect.signature`` list each of ``**keywords: Unpack[GenerateKeywords]``."""
    own = signature(function)
    known = get_type_hints(GenerateKeywords).items()
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=kind) for name, kind in known]
    parts = [part for part in own.parameters.values() if part.kind is not Parameter.VAR_KEYWORD]
    vars(function)["__signature__"] = own.replace(parameters=[*parts, *added])
    return function


@dataclass(frozen=True)
class Request:
    """A validated request, kept with its sequence in the engine.

    Attributes:
        content: ``prompt``, ``images`` and ``videos``.
        inputs: further keywords, passed to the processor's ``encode``.
    """

    content: Mapping[str, Any]
    params: SamplingParams
    options: DecodeOptions
    inputs: Mapping[str, Any]


def parse(
    requests: Sequence[Mapping[str, Any]],
    keywords: Mapping[str, Any],
    inputs: Collection[str] | None = None,
    attempt: Attempt = raising,
) -> list[Any]:
    """Validate requests and their shared keywords. Media are validated when read.

    Args:
        attempt: ``returning`` returns an invalid request's error in its place.
        inputs: further keywords that the processor accepts; None if they are not known.

    Raises:
        UserError: an invalid keyword, a keyword that duplicates ``params``, an unknown key of a request, or a prompt
            that is missing or neither text nor chat messages.
    """
    if not isinstance(requests, Sequence) or isinstance(requests, str | bytes):
        raise UserError(f"requests must be a list of dicts: got {shown(requests)}")
    left = dict(keywords)
    if "nodes" in left:
        left["num_draft_tokens"] = num_draft_tokens_of(left.get("num_draft_tokens"), left.pop("nodes"))
    params, options = pop_params(left), DecodeOptions(**_pop_fields(left, DecodeOptions))
    for name in left:
        if inputs is not None and name not in inputs:
            known = [*SamplingParams.__dataclass_fields__, *DecodeOptions.__dataclass_fields__, "params", *inputs]
            hint = f"; write {_ELSEWHERE[name]} instead" if name in _ELSEWHERE else nearest(name, known)
            raise UserError(f"unknown option for this model: got {name}{hint}")

    def checked(content: Any) -> Request:
        _check_content(content)
        return Request(content, content.get("params") or params, options, left)

    return [attempt(partial(checked, content)) for content in requests]


def num_draft_tokens_of(num_draft_tokens: int | None, nodes: int | None) -> int | None:
    """``num_draft_tokens``, or its former name ``nodes``. Raises ``UserError``: both, or a negative number."""
    if num_draft_tokens is not None and nodes is not None:
        raise UserError("nodes is the former name of num_draft_tokens: expected one of them, received both")
    return check("num_draft_tokens", NonNegativeInt | None, nodes if num_draft_tokens is None else num_draft_tokens)


def pop_params(keywords: dict[str, Any]) -> SamplingParams:
    """Pop ``params``, or the keywords that are its fields. Raises ``UserError``: as for ``parse``."""
    params, given = keywords.pop("params", None), _pop_fields(keywords, SamplingParams)
    if params is None:
        return SamplingParams(**given)
    if given:
        raise UserError(f"expected either params or sampling keywords: got params and {', '.join(given)}")
    return check("params", _Params, params)


def _pop_fields(keywords: dict[str, Any], kind: Any) -> dict[str, Any]:
    return {field.name: keywords.pop(field.name) for field in fields(kind) if field.name in keywords}


class _URL(TypedDict):
    url: str


_MediaURL = Annotated[_URL, BeforeValidator(lambda url: {"url": url} if isinstance(url, str) else url)]


class _TextItem(TypedDict):
    type: Literal["text"]
    text: Text


class _MediaItem(TypedDict):
    type: Literal["image", "video"]


class _ImageURLItem(TypedDict):  # OpenAI's
    type: Literal["image_url"]
    image_url: _MediaURL


class _VideoURLItem(TypedDict):
    type: Literal["video_url"]
    video_url: _MediaURL


_ITEMS = ("text", "image", "video", "image_url", "video_url")
_Item = Annotated[_TextItem | _MediaItem | _ImageURLItem | _VideoURLItem, Field(discriminator="type")]


class _Message(TypedDict):
    role: Text
    content: Annotated[
        list[_Item], BeforeValidator(lambda text: [{"type": "text", "text": text}] if isinstance(text, str) else text)
    ]


def _check_content(request: Any) -> None:
    if not isinstance(request, Mapping):
        raise UserError(f'a request must be a dict with a prompt, as {{"prompt": "Hello"}}: got {shown(request)}')
    if unknown := [str(key) for key in request if key not in _KEYS]:
        is_param = unknown[0] in SamplingParams.__dataclass_fields__
        hint = ", which belongs into params: SamplingParams(...)" if is_param else nearest(unknown[0], _KEYS)
        raise UserError(f"a request's keys are {', '.join(_KEYS)}: got {unknown[0]}{hint}")
    if "prompt" not in request:
        raise UserError(f"a request must have a prompt: got {', '.join(request) or 'nothing'}")
    check("params", _Params | None, request.get("params"))
    prompt = request["prompt"]
    if isinstance(prompt, str):
        check("prompt", Text, prompt)
    elif not isinstance(prompt, list | tuple):
        raise UserError(f"a prompt must be text, chat messages or token ids: got {shown(prompt)}")
    elif any(isinstance(one, str | list | tuple) for one in prompt):
        raise UserError(
            "a prompt is one text, or one list of chat messages or token ids: several go to "
            f'generate_batch([{{"prompt": ...}}, ...]), got {shown(prompt)}'
        )
    elif not is_token_ids(prompt):
        check("prompt", list[_Message], prompt, _ITEMS, strict=False)
