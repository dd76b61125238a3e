"""Sampling parameters of a request. This module must not import torch: the command line derives options from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from mmspec.checks import (
    FLAG,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Checked,
    Rule,
    is_text,
    number,
    option,
    optional,
    settable,
    whole,
    within,
)
from mmspec.errors import UserError
from mmspec.sampling.syntax import JSON_SCHEMA, KINDS, TEXT, TRIGGER, check_grammar

MIN_TEMPERATURE = 1e-4  # a smaller divisor may overflow logits

_TEMPERATURE = NOT_NEGATIVE._replace(convert=lambda value: float(value) if value >= MIN_TEMPERATURE else 0.0)


def _stops(stop: Any) -> Sequence[Any]:
    return [stop] if isinstance(stop, str) else stop


_STOP = Rule(
    "text or a list of texts",
    lambda stop: not isinstance(stop, Mapping) and all(map(is_text, _stops(stop))),
    lambda stop: stop if stop and isinstance(stop, str) else tuple(filter(None, _stops(stop))),
    several=True,
)
_NATS = number("0 or more", lambda x: 0 <= x < inf)
_PENALTY = within(-2, 2)._replace(limits="in [-2, 2]")
_TOKEN, _BIAS = whole(0), within(-100, 100)  # ranges of OpenAI's API
_SEED = optional(whole(-(1 << 63), (1 << 64) - 1))._replace(limits="")  # range of torch's generators


def _biases(given: Any) -> Any:
    """Sorted pairs of token id and bias: hashable, and equal for equal mappings."""
    return tuple(sorted((int(token), float(bias)) for token, bias in _pairs(given)))


def _are_biases(given: Any) -> bool:
    tokens = [int(token) if isinstance(token, str) and token.isdecimal() else token for token, _ in _pairs(given)]
    return all(map(_TOKEN.holds, tokens)) and all(_BIAS.holds(bias) for _, bias in _pairs(given))


def _pairs(given: Any) -> Collection[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        return given.items()
    if isinstance(given, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        return given
    raise TypeError


def _read_biases(text: str) -> dict[str, float]:
    pairs = (part.partition("=") for part in text.split(","))
    return {token.strip(): float(bias) for token, _, bias in pairs}


_LOGIT_BIAS = optional(
    Rule(
        "token ids with biases in [-100, 100], as 42=-100,7=1.5 on the command line",
        _are_biases,
        _biases,
        "id=bias,...",
        _read_biases,
    )
)


def _parameter(library: Any, rule: Rule, text: str = "") -> Any:
    """A parameter whose default is taken from the model's generation config, then from the library."""
    default = f"the model's, or {library:g}" if library != () else ""
    return option(None, settable(rule), text, library=library, default_text=default)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """Sampling parameters, with the names and semantics of transformers' generation config.

    The first seven and ``min_new_tokens`` are None if not set; their values then come from the model's generation
    config, or else from the library (see ``mmspec.load``).

    Attributes:
        temperature: below 0.0001 is greedy decoding; otherwise logits are divided by it and sampled. The library's
            default is 0.
        top_p: nucleus sampling: smallest set of tokens with at least this total probability, in [0, 1]; 1 disables, 0
            is greedy decoding.
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
            ``mmspec.sampling.aligned``): outputs that violate the grammar are rejected and restarted. No effect without
            a grammar.
        lossy: above 0, greedy outputs may differ from the model's: a drafted token is accepted if its negative log
            probability under the model, in nats, is at most this (``lossy_choices``). ``Stats.lossless`` of the answer
            is then False.

    Raises:
        UserError: a value has the wrong type or is out of range; more than one of ``json_schema``, ``regex`` and
            ``grammar`` is given, one of them with ``ignore_eos``, or ``grammar_trigger`` with none; or llguidance does
            not support the grammar.
    """

    temperature: float | None = _parameter(0.0, _TEMPERATURE, "0 is greedy.")
    top_p: float | None = _parameter(1.0, SHARE, "Probability of the tokens kept; 0 is greedy.")
    top_k: int | None = _parameter(0, whole(0), "Number of tokens kept; 0 keeps all.")
    min_p: float | None = _parameter(0.0, SHARE, "Least probability, relative to the most probable token.")
    repetition_penalty: float | None = _parameter(1.0, POSITIVE, "Above 1 penalises earlier tokens.")
    max_new_tokens: int | None = _parameter(256, whole(1, 1 << 31))
    stop: str | Sequence[str] | None = _parameter((), _STOP, "Stop before this text; repeatable.")
    seed: int | None = option(None, _SEED, "Seed of sampling.")
    json_schema: str | Mapping[str, Any] | None = option(None, JSON_SCHEMA, "Answer in JSON of this schema.")
    regex: str | None = option(None, TEXT._replace(word="pattern"), "Answer with a match of this regular expression.")
    grammar: str | None = option(None, TEXT._replace(word="text file"), "Answer according to this Lark grammar.")
    min_new_tokens: int | None = _parameter(0, whole(0, 1 << 31), "No end of sequence before.")
    presence_penalty: float = option(0.0, _PENALTY, "Penalises tokens that are in the output.")
    frequency_penalty: float = option(0.0, _PENALTY, "Penalises tokens each time that they are in the output.")
    logit_bias: Any = option(None, _LOGIT_BIAS, "Added to the logits of tokens, as 42=-100,7=1.5.")
    grammar_trigger: str | None = option(None, TRIGGER, "Constrain only what follows this text.")
    ignore_eos: bool = option(False, FLAG, "Go on after an end of sequence.")
    grammar_aligned: bool = option(False, FLAG, "Sample exactly by rejection, not with masks, under a grammar.")
    lossy: float = option(0.0, _NATS, "Above 0, accept drafts up to this -log p: other answers than the model's.")

    def __post_init__(self) -> None:
        super().__post_init__()
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


LIBRARY: Mapping[str, Any] = {
    one.name: one.metadata["library"] for one in fields(SamplingParams) if "library" in one.metadata
}
"""Default values of parameters that neither a request nor its model sets."""
