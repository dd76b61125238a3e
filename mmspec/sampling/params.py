"""Sampling parameters of a request. This module must not import torch: the command line derives options from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from operator import index
from typing import Annotated, Any

from annotated_types import Interval
from pydantic import AfterValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from mmspec.errors import UserError
from mmspec.sampling.syntax import KINDS, CheckedText, check_grammar, trigger_pattern
from mmspec.validation import Share, condition, is_text, option, options

MIN_TEMPERATURE = 1e-4  # a smaller divisor may overflow logits

Temperature = Annotated[float, Field(ge=0), AfterValidator(lambda value: value if value >= MIN_TEMPERATURE else 0.0)]
MOST_LOGPROBS = 20
"""Largest number of alternatives per token, as in OpenAI's API."""

Logprobs = Annotated[int, Interval(ge=0, le=MOST_LOGPROBS)]
MaxTokens = Annotated[int, Interval(ge=1, le=1 << 31)]
MinTokens = Annotated[int, Interval(ge=0, le=1 << 31)]
Penalty = Annotated[float, Interval(ge=-2, le=2)]  # range of OpenAI's API
NotEmpty = Annotated[str, condition("text that is not empty", lambda value: is_text(value) and bool(value))]


def _stop(value: Any) -> Any:
    try:
        texts = () if isinstance(value, Mapping) else (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        texts = (None,)
    if isinstance(value, Mapping) or not all(map(is_text, texts)):
        raise PydanticCustomError("condition", "text or a list of texts")
    return value if value and isinstance(value, str) else tuple(filter(None, texts))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Sorted pairs of token id and bias: hashable, and equal for equal mappings."""
    try:
        pairs = [(int(token) if isinstance(token, str) else index(token), bias) for token, bias in dict(value).items()]
        if not any(isinstance(token, bool) for token in value) and all(
            token >= 0 and -100 <= bias <= 100 for token, bias in pairs
        ):  # ranges of OpenAI's API
            return tuple(sorted((token, float(bias)) for token, bias in pairs))
    except (TypeError, ValueError):
        pass
    raise PydanticCustomError("condition", "token ids with biases in [-100, 100]")


def _schema(value: Any) -> str:
    """The schema as text."""
    if isinstance(value, CheckedText):
        return value
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, TypeError, RecursionError):
        pass
    raise PydanticCustomError("condition", "a JSON schema, as a dict or as text")


def _is_trigger(value: Any) -> bool:
    try:
        return is_text(value) and value != "" and bool(trigger_pattern(value))
    except re.error:
        return False


StopStrings = Annotated[str | Sequence[str], PlainValidator(_stop)]
SchemaText = Annotated[str | Mapping[str, Any], PlainValidator(_schema)]
Trigger = Annotated[str, condition("text that is not empty, or /PATTERN/ of Python's re", _is_trigger)]


LIBRARY: Mapping[str, Any] = dict(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    max_new_tokens=256,
    stop=(),
    min_new_tokens=0,
)
"""Default values of parameters that neither a request nor its model sets."""


def _parameter(name: str, text: str = "", **limits: Any) -> Any:
    """A parameter whose default is taken from the model's generation config, then from ``LIBRARY``."""
    usual = LIBRARY[name]
    return option(None, text, default_text=f"the model's, or {usual:g}" if usual != () else "", **limits)


@options
class SamplingParams:
    """Sampling parameters, with the names and semantics of transformers' generation config.

    The first seven and ``min_new_tokens`` are None if not set; their values then come from the model's generation
    config, or else from the library (see ``mmspec.load``).

    Attributes:
        temperature: below 0.0001 is greedy decoding; otherwise logits are divided by it and sampled. Default: 0.
        top_p: nucleus sampling: smallest set of tokens with this total probability, in [0, 1]; 1 disables, 0 is greedy.
        top_k: keep the k most probable tokens; 0 disables.
        min_p: minimum probability relative to the most probable token, in [0, 1]; 0 disables.
        repetition_penalty: above 1 penalises tokens of prompt and output; 1 disables.
        max_new_tokens: maximum number of generated tokens; 256 by the library's default.
        stop: stop string or strings; the output is cut before them. An empty list or text disables.
        seed: seed for sampling; None uses torch's global generator.
        json_schema: the output is JSON that satisfies this schema, a dict or JSON text.
        regex: the whole output matches this regular expression.
        grammar: the output follows this grammar, in llguidance's variant of Lark's syntax.
        min_new_tokens: minimum number of tokens before an EOS token; stop strings may end an output earlier.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once per token and once
            per occurrence; in [-2, 2]. Applied after the repetition penalty.
        logit_bias: dict of biases in [-100, 100] by token id, added to the logits.
        ignore_eos: continue after EOS tokens, up to ``max_new_tokens``.
        grammar_trigger: constrain only the output after this text, to the end. ``^TEXT`` matches only at the beginning
            of the output; ``/PATTERN/`` is a Python regular expression.
        grammar_aligned: sampled outputs follow the model's distribution given the grammar, which masks distort (see
            ``mmspec.sampling.sampler.Alignment``): outputs that violate the grammar are rejected and restarted. No
            effect without a grammar.
        lossy: above 0, greedy outputs may differ from the model's: a drafted token is accepted if its negative log
            probability under the model, in nats, is at most this (``lossy_choices``); ``Stats.lossless`` is then False.

    Raises:
        UserError: a value has the wrong type or is out of range; more than one of ``json_schema``, ``regex`` and
            ``grammar`` is given, one of them with ``ignore_eos``, or ``grammar_trigger`` with none; or llguidance does
            not support the grammar.
    """

    temperature: Temperature | None = _parameter("temperature", "0 is greedy.")
    top_p: Share | None = _parameter("top_p", "Probability of the tokens kept; 0 is greedy.")
    top_k: int | None = _parameter("top_k", "Number of tokens kept; 0 keeps all.", ge=0)
    min_p: Share | None = _parameter("min_p", "Least probability, relative to the most probable token.")
    repetition_penalty: float | None = _parameter("repetition_penalty", "Above 1 penalises earlier tokens.", gt=0)
    max_new_tokens: MaxTokens | None = _parameter("max_new_tokens")
    stop: StopStrings | None = _parameter("stop", "Stop before this text; repeatable.")
    seed: int | None = option(None, "Seed of sampling.", ge=-(1 << 63), le=(1 << 64) - 1)
    json_schema: SchemaText | None = option(None, "Answer in JSON of this schema.")
    regex: NotEmpty | None = option(None, "Answer with a match of this regular expression.")
    grammar: NotEmpty | None = option(None, "Answer according to this Lark grammar.")
    min_new_tokens: MinTokens | None = _parameter("min_new_tokens", "No end of sequence before.")
    presence_penalty: Penalty = option(0.0, "Penalises tokens that are in the output.")
    frequency_penalty: Penalty = option(0.0, "Penalises tokens each time that they are in the output.")
    logit_bias: Annotated[Any, PlainValidator(_biases)] | None = option(
        None, "Added to the logits of tokens, as 42=-100,7=1.5."
    )
    grammar_trigger: Trigger | None = option(None, "Constrain only what follows this text.")
    ignore_eos: bool = option(False, "Go on after an end of sequence.")
    grammar_aligned: bool = option(False, "Sample exactly by rejection, not with masks, under a grammar.")
    lossy: float = option(0.0, "Above 0, accept drafts up to this -log p: other answers than the model's.", ge=0)

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise UserError(f"only one of {', '.join(KINDS)} constrains an output: got {', '.join(given)}")
        if given and self.ignore_eos:
            raise UserError(f"ignore_eos does not go with {given[0]}: the end of a grammar is the output's")
        if self.grammar_trigger is not None and not given:
            raise UserError(f"grammar_trigger goes with one of {', '.join(KINDS)}: got none of them")
        if self.constraint:
            kind, text = self.constraint
            object.__setattr__(self, kind, check_grammar(kind, text))  # marked as checked: copies skip compilation

    @property
    def constraint(self) -> tuple[str, str] | None:
        """Kind and text of the grammar; None without one."""
        given = ((kind, getattr(self, kind)) for kind in KINDS)
        return next(((kind, text) for kind, text in given if text is not None), None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def do_sample(self) -> bool:
        return bool(self.temperature) and self.top_p != 0

    def over(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill unset parameters from ``defaults``, which must be valid, as fields are not checked again."""
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if not unset:
            return self
        filled = copy(self)
        vars(filled).update(unset)
        return filled
