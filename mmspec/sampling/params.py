"""Sampling parameters of a request. Without torch, as the command line derives its options from them."""

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

MIN_TEMPERATURE = 1e-4  # logits divided by less may overflow

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
_SEED = optional(whole(-(1 << 63), (1 << 64) - 1))._replace(limits="")  # what torch's generators take


def _biases(given: Any) -> Any:
    """Pairs of token id and bias, sorted: hashable, and equal for equal mappings."""
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
    """A parameter that may be left to the model's generation config, and otherwise has the library's value."""
    default = f"the model's, or {library:g}" if library != () else ""
    return option(None, settable(rule), text, library=library, default_text=default)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """Sampling parameters, with the names and semantics of transformers' generation config.

    The first seven and ``min_new_tokens`` are None if they are not set: they are then those of the model's generation
    config, and otherwise the library's (see ``mmspec.load``).

    Attributes:
        temperature: below 0.0001 is greedy decoding, and 0 the library's default; otherwise logits are divided by it
            and sampled.
        top_p: nucleus sampling: smallest set of tokens with at least this total probability, in [0, 1]; 1 disables, 0
            is greedy decoding.
        top_k: keep the k most probable tokens; 0 disables.
        min_p: minimum probability relative to the most probable token, in [0, 1]; 0 disables.
        repetition_penalty: above 1 penalises tokens of prompt and output; 1 disables.
        max_new_tokens: maximum number of generated tokens; 256 by the library's default.
        stop: stop string or strings; the output is cut before them. An empty list or text is none.
        seed: seed for sampling; None uses torch's global generator.
        json_schema: the output is JSON that satisfies this schema, a dict or JSON text.
        regex: the output matches this regular expression, from beginning to end.
        grammar: the output follows this grammar, in llguidance's variant of Lark's syntax.
        min_new_tokens: no EOS token before so many others; a stop string ends an output in any case.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once and for each time
            that they are in it; in [-2, 2]. They follow the repetition penalty.
        logit_bias: added to logits, by token id: a dict of biases in [-100, 100].
        ignore_eos: go on after EOS tokens, up to ``max_new_tokens``.
        grammar_trigger: the output is free up to this text, and only what follows it is constrained, to the end.
            ``^TEXT`` counts at the beginning of the output only, ``/PATTERN/`` is a regular expression of Python's.
        grammar_aligned: sampled outputs follow the model's distribution given the grammar, which masks distort (see
            ``mmspec.sampling.aligned``): outputs that leave the grammar are rejected and begun anew. Without an effect
            where there is no grammar.
        lossy: above 0, greedy outputs may differ from the model's: a drafted token is accepted if the model's negative
            log probability of it, in nats, is at most this (``lossy_choices``). ``Stats.lossless`` of the answer is
            then False.

    Raises:
        UserError: a value has the wrong type or is out of range; several of ``json_schema``, ``regex`` and ``grammar``
            are given, one beside ``ignore_eos``, ``grammar_trigger`` without one, or llguidance cannot follow it.
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
            object.__setattr__(self, kind, check_grammar(kind, text))  # marked: a copy does not compile it again

    @property
    def constraint(self) -> tuple[str, str] | None:
        """Kind and text of the grammar, if any."""
        given = ((kind, getattr(self, kind)) for kind in KINDS)
        return next(((kind, text) for kind, text in given if text is not None), None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def do_sample(self) -> bool:
        return bool(self.temperature) and self.top_p != 0

    def over(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """These parameters, with those that are not set from ``defaults``, which must be valid: no field is checked."""
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if not unset:
            return self
        filled = copy(self)
        vars(filled).update(unset)
        return filled


LIBRARY: Mapping[str, Any] = {
    one.name: one.metadata["library"] for one in fields(SamplingParams) if "library" in one.metadata
}
"""Values of parameters that neither a request nor its model sets."""
