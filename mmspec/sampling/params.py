"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from mmspec.checks import Checked, Rule, is_text, number, option, optional, settable, whole
from mmspec.errors import UserError
from mmspec.sampling.grammar import Grammar
from mmspec.sampling.sampler import Processor, Sampler
from mmspec.sampling.syntax import JSON_SCHEMA, KINDS, TEXT, check_grammar

MIN_TEMPERATURE = 1e-4  # logits divided by less may overflow
LIBRARY: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_new_tokens": 256,
    "stop": (),
}
"""Values of parameters that neither a request nor its model sets."""

_STOP = Rule(
    "text or a list of texts, none of them empty",
    lambda stop: stop is None or all(is_text(text) and text for text in ([stop] if isinstance(stop, str) else stop)),
)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """Sampling parameters, with the names and semantics of transformers' generation config.

    The first seven are None if they are not set: they are then those of the model's generation config, and otherwise
    the library's (see ``mmspec.load``).

    Attributes:
        temperature: 0 is greedy decoding, the library's default; otherwise logits are divided by it and sampled.
        top_p: nucleus sampling: smallest set of tokens with at least this total probability, in (0, 1]; 1 disables.
        top_k: keep the k most probable tokens; 0 disables.
        min_p: minimum probability relative to the most probable token, in [0, 1]; 0 disables.
        repetition_penalty: above 1 penalises tokens of prompt and output; 1 disables.
        max_new_tokens: maximum number of generated tokens; 256 by the library's default.
        stop: stop string or strings; the output is cut before them. An empty list is none.
        seed: seed for sampling; None uses torch's global generator.
        json_schema: the output is JSON that satisfies this schema, a dict or JSON text.
        regex: the output matches this regular expression, from beginning to end.
        grammar: the output follows this grammar, in llguidance's variant of Lark's syntax.

    Raises:
        UserError: a value has the wrong type or is out of range; several of ``json_schema``, ``regex`` and ``grammar``
            are given, or llguidance cannot follow the one that is.
    """

    temperature: float | None = option(
        None, settable(number(f"0 or >= {MIN_TEMPERATURE}", lambda t: t == 0 or t >= MIN_TEMPERATURE))
    )
    top_p: float | None = option(None, settable(number("in (0, 1]", lambda p: 0 < p <= 1)))
    top_k: int | None = option(None, settable(whole(0)))
    min_p: float | None = option(None, settable(number("in [0, 1]", lambda p: 0 <= p <= 1)))
    repetition_penalty: float | None = option(None, settable(number("> 0", lambda penalty: penalty > 0)))
    max_new_tokens: int | None = option(None, settable(whole(1, 1 << 31)))
    stop: str | Sequence[str] | None = option(None, _STOP)
    seed: int | None = option(None, optional(whole(-(1 << 63), (1 << 64) - 1)))  # what torch's generators take
    json_schema: str | Mapping[str, Any] | None = option(None, JSON_SCHEMA)
    regex: str | None = option(None, TEXT)
    grammar: str | None = option(None, TEXT)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise UserError(f"only one of {', '.join(KINDS)} constrains an output: got {', '.join(given)}")
        if self.constraint:
            check_grammar(*self.constraint)

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
        return bool(self.temperature)

    def over(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """These parameters, with those that are not set from ``defaults``."""
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **unset) if unset else self

    def sampler(
        self,
        custom: Sequence[Processor] = (),
        constraint: Grammar | None = None,
        processors: LogitsProcessorList | None = None,
    ) -> Sampler:
        """Sampler with these parameters.

        Args:
            custom: as for ``processors``.
            constraint: as for ``Sampler``.
            processors: all logits processors, ``custom`` included; None for those of these parameters alone.
        """
        chain = self.processors(custom) if processors is None else processors
        return Sampler(
            chain,
            do_sample=self.do_sample,
            generator=None if self.seed is None else torch.Generator().manual_seed(self.seed),
            key=None if custom else signature(chain),
            constraint=constraint,
        )

    def processors(self, custom: Sequence[Processor] = ()) -> LogitsProcessorList:
        """Logits processors in the order of transformers' ``generate``: ``custom`` ones precede the temperature."""
        chain = LogitsProcessorList()
        values: Any = self.over(LIBRARY)
        if values.repetition_penalty != 1.0:
            chain.append(hf.RepetitionPenaltyLogitsProcessor(values.repetition_penalty))
        chain.extend(custom)
        if not values.do_sample:
            return chain
        if values.temperature != 1.0:
            chain.append(hf.TemperatureLogitsWarper(values.temperature))
        if values.top_k:
            chain.append(hf.TopKLogitsWarper(values.top_k))
        if values.top_p < 1.0:
            chain.append(hf.TopPLogitsWarper(values.top_p))
        if values.min_p:
            chain.append(hf.MinPLogitsWarper(values.min_p))
        return chain


def signature(processors: Sequence[Any]) -> Hashable:
    """Key of logits processors: those with equal keys compute the same."""
    return tuple(
        (type(one), tuple((name, _comparable(value)) for name, value in sorted(vars(one).items())))
        for one in processors
    )


def _comparable(value: Any) -> Hashable:
    """A key of plain values and tensors; anything else equals nothing."""
    if isinstance(value, Tensor):
        return (value.dtype, value.shape, tuple(value.flatten().tolist()))
    if isinstance(value, dict):
        return tuple((_comparable(key), _comparable(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value if value is None or isinstance(value, bool | int | float | str) else object()
