"""Sampling parameters of a request. Without torch, as the command line derives its options from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from mmspec.checks import POSITIVE, SHARE, Checked, Rule, is_text, number, option, optional, settable, whole
from mmspec.errors import UserError
from mmspec.sampling.syntax import JSON_SCHEMA, KINDS, TEXT, check_grammar

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

    from mmspec.sampling.sampler import Processor, Sampler

MIN_TEMPERATURE = 1e-4  # logits divided by less may overflow

_STOP = Rule(
    "text or a list of texts, none of them empty",
    lambda stop: stop is None or all(is_text(text) and text for text in ([stop] if isinstance(stop, str) else stop)),
    several=True,
)
_SEED = optional(whole(-(1 << 63), (1 << 64) - 1))._replace(limits="")  # what torch's generators take


def _parameter(library: Any, rule: Rule, text: str = "") -> Any:
    """A parameter that may be left to the model's generation config, and otherwise has the library's value."""
    default = f"the model's, or {library:g}" if library != () else ""
    return option(None, settable(rule), text, library=library, default_text=default)


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

    temperature: float | None = _parameter(
        0.0, number(f"0 or >= {MIN_TEMPERATURE}", lambda t: t == 0 or t >= MIN_TEMPERATURE), "0 is greedy."
    )
    top_p: float | None = _parameter(1.0, number("in (0, 1]", lambda p: 0 < p <= 1), "Probability of the tokens kept.")
    top_k: int | None = _parameter(0, whole(0), "Number of tokens kept; 0 keeps all.")
    min_p: float | None = _parameter(0.0, SHARE, "Least probability, relative to the most probable token.")
    repetition_penalty: float | None = _parameter(1.0, POSITIVE, "Above 1 penalises earlier tokens.")
    max_new_tokens: int | None = _parameter(256, whole(1, 1 << 31))
    stop: str | Sequence[str] | None = _parameter((), _STOP, "Stop before this text; repeatable.")
    seed: int | None = option(None, _SEED, "Seed of sampling.")
    json_schema: str | Mapping[str, Any] | None = option(None, JSON_SCHEMA, "Answer in JSON of this schema.")
    regex: str | None = option(None, TEXT._replace(word="pattern"), "Answer with a match of this regular expression.")
    grammar: str | None = option(None, TEXT._replace(word="text file"), "Answer according to this Lark grammar.")

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

    def sampler(self, custom: Sequence[Processor] = ()) -> Sampler:
        """Sampler with these parameters and ``processors``."""
        from mmspec.sampling.chain import sampler

        return sampler(self, custom, self.processors(custom))

    def processors(self, custom: Sequence[Processor] = ()) -> LogitsProcessorList:
        """Logits processors in the order of transformers' ``generate``: ``custom`` ones precede the temperature."""
        from mmspec.sampling.chain import processors

        return processors(self, custom)


LIBRARY: Mapping[str, Any] = {
    one.name: one.metadata["library"] for one in fields(SamplingParams) if "library" in one.metadata
}
"""Values of parameters that neither a request nor its model sets."""
