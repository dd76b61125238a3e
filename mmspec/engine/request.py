"""Validation of requests, before any file is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import partial
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from mmspec.checks import FLAG, TEXT, Checked, Rule, is_text, nearest, number, option, optional, shown, whole
from mmspec.errors import Attempt, UserError, raising
from mmspec.sampling.logprobs import LOGPROBS
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.processors import TreeProcessor
from mmspec.sampling.thoughts import REASONING
from mmspec.targets.processor import is_token_ids

F = TypeVar("F", bound=Callable[..., Any])

_KEYS = ("prompt", "images", "videos", "params")
_ITEMS = ("text", "image", "video", "image_url", "video_url")  # item types of a message; the last two are OpenAI's
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
_FUNCTIONS = Rule(
    "a list of callables", lambda value: isinstance(value, Sequence) and all(callable(one) for one in value)
)
_PROCESSORS = Rule(
    "a list of logits processors",
    lambda value: isinstance(value, Sequence) and all(_is_processor(one) for one in value),
)

NUM_DRAFT_TOKENS = optional(whole(0))
SEQ_COUNT = whole(1)
PARAMS = Rule("mmspec.SamplingParams", lambda value: isinstance(value, SamplingParams))


@dataclass(frozen=True)
class DecodeOptions(Checked):
    """Decoding options shared by all requests of a call.

    Attributes:
        num_draft_tokens: draft tokens per step, the size of the trees; None chooses adaptively. ``nodes`` is an alias.
        logits_processor: as for transformers' ``generate``, or tree processors.
        stopping_criteria: as for transformers' ``generate``.
        trace: record the verified trees.
        logprobs: number of alternatives per token, at most 20, whose log probabilities are recorded alongside the
            token's, before logits processors and sampling parameters; None records none.
        chat_template: render prompts with the model's chat template if it has one; False uses text prompts as is.
        max_time: seconds after the first token, at which the answer ends with finish reason ``"length"``; None for no
            limit.
        reasoning: format of the reasoning before an answer (``mmspec.sampling.thoughts``). Reasoning is returned
            separately, and grammars, triggers and stop strings start after it. ``"auto"`` uses the chat template's
            format; None makes reasoning a part of the answer.
        adapter: name of a LoRA adapter of ``mmspec.load(adapters=...)``; None for the model without one.
        context_limit: maximum length of prompt plus output if it is below the model's; None for the model's.
    """

    num_draft_tokens: int | None = option(None, NUM_DRAFT_TOKENS)
    logits_processor: Sequence[Any] = option((), _PROCESSORS)
    stopping_criteria: Sequence[Any] = option((), _FUNCTIONS)
    trace: bool = option(False, FLAG)
    logprobs: int | None = option(None, LOGPROBS)
    chat_template: bool = option(True, FLAG)
    max_time: float | None = option(None, optional(number("a number >= 0", lambda value: value >= 0)))
    reasoning: str | None = option(None, REASONING)
    adapter: str | None = option(None, optional(TEXT))
    context_limit: int | None = option(None, optional(whole(1)))


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
    logit_bias: Any
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
    tools: Sequence[Mapping[str, Any]] | None
    answer_start: str
    chat_template_kwargs: Mapping[str, Any] | None
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
    params, options = _pop_params(left), DecodeOptions(**_pop_fields(left, DecodeOptions))
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
    """``num_draft_tokens``, or its former name ``nodes``.

    Raises:
        UserError: both are given, or the number is negative.
    """
    if num_draft_tokens is not None and nodes is not None:
        raise UserError("nodes is the former name of num_draft_tokens: expected one of them, received both")
    return NUM_DRAFT_TOKENS.check("num_draft_tokens", nodes if num_draft_tokens is None else num_draft_tokens)


def params_of(keywords: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a call's keywords.

    Raises:
        UserError: as for ``parse``.
    """
    return _pop_params(dict(keywords))


def _pop_params(keywords: dict[str, Any]) -> SamplingParams:
    """Pop ``params``, or the keywords that are its fields."""
    params, fields = keywords.pop("params", None), _pop_fields(keywords, SamplingParams)
    if params is None:
        return SamplingParams(**fields)
    if fields:
        raise UserError(f"expected either params or sampling keywords: got params and {', '.join(fields)}")
    return PARAMS.check("params", params)


def _is_processor(value: Any) -> bool:
    return not isinstance(value, type) and (callable(value) or isinstance(value, TreeProcessor))


def _pop_fields(keywords: dict[str, Any], kind: Any) -> dict[str, Any]:
    return {field.name: keywords.pop(field.name) for field in fields_of(kind) if field.name in keywords}


def _check_content(request: Any) -> None:
    if not isinstance(request, Mapping):
        raise UserError(f'a request must be a dict with a prompt, as {{"prompt": "Hello"}}: got {shown(request)}')
    known = f"a request's keys are {', '.join(_KEYS)}"
    if unknown := [str(key) for key in request if key not in _KEYS]:
        fields = SamplingParams.__dataclass_fields__
        among_params = ", which belongs into params: SamplingParams(...)"
        hint = among_params if unknown[0] in fields else nearest(unknown[0], _KEYS)
        raise UserError(f"{known}: got {unknown[0]}{hint}")
    if "prompt" not in request:
        raise UserError(f"a request must have a prompt: got {', '.join(request) or 'nothing'}")
    _check_prompt(request["prompt"])
    if request.get("params") is not None:
        PARAMS.check("params", request["params"])


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        _check_text(prompt)
    elif is_token_ids(prompt):
        return
    elif not isinstance(prompt, list | tuple):
        raise UserError(f"a prompt must be text, chat messages or token ids: got {shown(prompt)}")
    elif any(isinstance(one, str | list | tuple) for one in prompt):
        raise UserError(
            "a prompt is one text, or one list of chat messages or token ids: several go to "
            f'generate_batch([{{"prompt": ...}}, ...]), got {shown(prompt)}'
        )
    else:
        for message in prompt:
            _check_message(message)


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"a chat message must be a dict with a role and content: got {shown(message)}")
    content = message.get("content")
    if isinstance(content, str):
        return _check_text(content)
    if not isinstance(content, list | tuple):
        raise UserError(f"a message's content must be text or a list of items: got {shown(content)}")
    for item in content:
        if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
            raise UserError(f"an item of a message must be a dict with a type: got {shown(item)}")
        _check_item(item)


def _check_item(item: Mapping[str, Any]) -> None:
    kind = item["type"]
    if kind not in _ITEMS:
        raise UserError(f"an item's type must be {', '.join(_ITEMS[:-1])} or {_ITEMS[-1]}: got {shown(kind)}")
    if kind == "text":
        if not isinstance(item.get("text"), str):
            raise UserError(f"a text item must have a text: got {shown(item)}")
        _check_text(item["text"])
    elif kind.endswith("_url"):
        url = item.get(kind)
        if not isinstance(url.get("url") if isinstance(url, Mapping) else url, str):
            raise UserError(f'an item of type {kind} must have {{"{kind}": {{"url": ...}}}}: got {shown(item)}')


def _check_text(text: str) -> None:
    if not is_text(text):
        at = next(place for place, character in enumerate(text) if not is_text(character))
        raise UserError(f"a prompt must be text that UTF-8 can encode: got {text[at]!r} at character {at}")
