"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from mmspec.checks import Checked, Rule, is_text, number, option, optional, whole
from mmspec.errors import UserError
from mmspec.sampling.grammar import JSON_SCHEMA, KINDS, TEXT, Grammar, check_grammar
from mmspec.sampling.sampler import Processor, Sampler

_MIN_TEMPERATURE = 1e-4  # logits divided by less may overflow
_STOP = Rule(
    "text or a list of texts, none of them empty",
    lambda stop: stop is None or all(is_text(text) and text for text in ([stop] if isinstance(stop, str) else stop)),
)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """Sampling parameters, with the names and semantics of transformers' generation config.

    Attributes:
        temperature: 0 is greedy decoding; otherwise logits are divided by it and sampled.
        top_p: nucleus sampling: smallest set of tokens with at least this total probability, in (0, 1]; 1 disables.
        top_k: keep the k most probable tokens; 0 disables.
        min_p: minimum probability relative to the most probable token, in [0, 1].
        repetition_penalty: above 1 penalises tokens of prompt and output; 1 disables.
        max_new_tokens: maximum number of generated tokens.
        stop: stop string or strings; the output is cut before them.
        seed: seed for sampling; None uses torch's global generator.
        json_schema: the output is JSON that satisfies this schema, a dict or JSON text.
        regex: the output matches this regular expression, from beginning to end.
        grammar: the output follows this grammar, in llguidance's variant of Lark's syntax.

    Raises:
        UserError: a value has the wrong type or is out of range; several of ``json_schema``, ``regex`` and ``grammar``
            are given, or llguidance cannot follow the one that is.
    """

    temperature: float = option(0.0, number(f"0 or >= {_MIN_TEMPERATURE}", lambda t: t == 0 or t >= _MIN_TEMPERATURE))
    top_p: float = option(1.0, number("in (0, 1]", lambda p: 0 < p <= 1))
    top_k: int = option(0, whole(0))
    min_p: float = option(0.0, number("in [0, 1]", lambda p: 0 <= p <= 1))
    repetition_penalty: float = option(1.0, number("> 0", lambda penalty: penalty > 0))
    max_new_tokens: int = option(256, whole(1, 1 << 31))
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
        return self.temperature > 0

    def sampler(self, custom: Sequence[Processor] = (), constraint: Grammar | None = None) -> Sampler:
        """Sampler with these parameters; ``custom`` as for ``processors``, ``constraint`` as for ``Sampler``."""
        values = self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty
        return Sampler(
            self.processors(custom),
            do_sample=self.do_sample,
            generator=None if self.seed is None else torch.Generator().manual_seed(self.seed),
            key=None if custom else values if self.do_sample else self.repetition_penalty,
            constraint=constraint,
        )

    def processors(self, custom: Sequence[Processor] = ()) -> LogitsProcessorList:
        """Logits processors in the order of transformers' ``generate``: ``custom`` ones precede the temperature."""
        chain = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            chain.append(hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        chain.extend(custom)
        if not self.do_sample:
            return chain
        if self.temperature != 1.0:
            chain.append(hf.TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            chain.append(hf.TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            chain.append(hf.TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            chain.append(hf.MinPLogitsWarper(self.min_p))
        return chain
