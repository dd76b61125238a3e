"""Samplers and logits processors from sampling parameters, and their defaults: the library's or a model's."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.generation import logits_process as hf

from mmspec.errors import UserError
from mmspec.sampling.params import LIBRARY, SamplingParams
from mmspec.sampling.processors import AdditiveTerms
from mmspec.sampling.sampler import Constraint, LogitsProcessor, Sampler
from mmspec.validation import part

MODELS, LIBRARYS = "auto", "mmspec"
Source = Literal["auto", "mmspec"]
"""Source of default values of sampling parameters."""

_OWN = tuple(name for name in LIBRARY if name != "stop")  # generation configs use the same names
_SAMPLING = ("temperature", "top_p", "top_k")  # generate() has its own defaults for these
_FILTERS = (  # in the order of transformers' generate, each with its neutral value
    ("temperature", 1.0, hf.TemperatureLogitsWarper),
    ("top_k", 0, hf.TopKLogitsWarper),
    ("top_p", 1.0, hf.TopPLogitsWarper),
    ("min_p", 0.0, hf.MinPLogitsWarper),
)


def sampler(
    params: SamplingParams,
    custom: Sequence[LogitsProcessor] = (),
    chain: LogitsProcessorList | None = None,
    constraint: Constraint | None = None,
) -> Sampler:
    """Sampler with these parameters.

    Args:
        custom: the request's custom logits processors.
        chain: all logits processors, ``custom`` included; by default the result of ``processors``.
        constraint: as for ``Sampler``.
    """
    chain = processors(params, custom) if chain is None else chain
    return Sampler(
        chain,
        do_sample=params.do_sample,
        generator=None if params.seed is None else torch.Generator().manual_seed(params.seed),
        key=None if custom else signature(chain),
        constraint=constraint,
        lossy=params.lossy,
        aligned=params.grammar_aligned and constraint is not None,
        least=params.min_new_tokens or 0,
    )


def processors(
    params: SamplingParams,
    custom: Sequence[LogitsProcessor] = (),
    prompt_length: int = 0,
    eos_token_ids: Sequence[int] = (),
) -> LogitsProcessorList:
    """Logits processors in the order of transformers' ``generate``: ``custom`` processors precede the temperature.

    Args:
        prompt_length: tokens before the output.
        eos_token_ids: tokens that are forbidden before ``min_new_tokens``.
    """
    chain, params = LogitsProcessorList(), params.over(LIBRARY)
    if params.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))  # type: ignore[arg-type]
    if params.min_new_tokens and eos_token_ids:
        ends = torch.tensor(eos_token_ids, dtype=torch.long)
        chain.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, ends))
    chain.extend(additive(params, prompt_length))
    chain.extend(custom)
    if params.do_sample:
        values = ((getattr(params, name), neutral, kind) for name, neutral, kind in _FILTERS)
        chain.extend(kind(value) for value, neutral, kind in values if value != neutral)
    return chain


def additive(params: SamplingParams, prompt_length: int) -> list[LogitsProcessor]:
    """Logits processor of ``logit_bias``, ``presence_penalty`` and ``frequency_penalty``; empty if none is set."""
    bias, presence, frequency = params.logit_bias or (), params.presence_penalty, params.frequency_penalty
    return [AdditiveTerms(bias, presence, frequency, prompt_length)] if bias or presence or frequency else []


def signature(processors: Sequence[Any]) -> Hashable:
    """Key of logits processors: equal keys mean equal computation."""
    return tuple(
        (type(one), tuple((name, _comparable(value)) for name, value in sorted(vars(one).items())))
        for one in processors
    )


def _comparable(value: Any) -> Hashable:
    """Hashable key of plain values and tensors; other objects get a unique key."""
    if isinstance(value, Tensor):
        return (value.dtype, value.shape, tuple(value.flatten().tolist()))
    if isinstance(value, dict):
        return tuple((_comparable(key), _comparable(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value if value is None or isinstance(value, bool | int | float | str) else object()


class Defaults:
    """Library defaults, without further logits processors. ``eos_token_ids``: tokens that end an answer."""

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos_token_ids = eos_token_ids

    @property
    def params(self) -> Mapping[str, Any]:
        """Default values of unset ``SamplingParams``."""
        return {}

    @property
    def served(self) -> Mapping[str, Any]:
        """Default values of ``mmspec generate`` and of requests to a server."""
        return self.params

    def complete(self, params: SamplingParams) -> SamplingParams:
        """Fill unset parameters with the model's, then the library's values."""
        return params.over({**LIBRARY, **self.params})

    def processors(
        self, params: SamplingParams, input_ids: Tensor, custom: Sequence[LogitsProcessor] = ()
    ) -> LogitsProcessorList:
        """All logits processors of a request, in ``generate``'s order; ``input_ids``: (1, length) int64, the prompt."""
        return processors(params, custom, input_ids.shape[1], self._eos_token_ids)

    def sampler(
        self,
        params: SamplingParams,
        input_ids: Tensor,
        custom: Sequence[LogitsProcessor] = (),
        constraint: Constraint | None = None,
    ) -> Sampler:
        """The sampler of a request; arguments as for ``processors``, ``constraint`` as for ``Sampler``."""
        return sampler(params, custom, self.processors(params, input_ids, custom), constraint)

    def describe(self) -> str:
        """One-line description of defaults that differ from the library's; empty if none differ."""
        shown = [f"{name} {value}" for name, value in self.params.items() if value != LIBRARY[name]]
        return ", ".join([*shown, *self.others()])

    def others(self) -> list[str]:
        """Names of further logits processors, not derived from the sampling parameters."""
        return []


class ModelDefaults(Defaults):
    """Defaults of a model's generation config, which is read at each request.

    Entries with a field in ``SamplingParams`` are its defaults. transformers builds logits processors from the other
    entries, as in ``generate``. Raises ``UserError``: the generation config requests another generation mode such as
    beam search, requests a logits processor that does not run on trees, or has a value out of range.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._checked: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # the config's last values: as read, and checked
        try:
            refuse_other_modes(model.generation_config)
            params = self.complete(SamplingParams())
            self.sampler(params, torch.zeros(1, 1, dtype=torch.long))
        except ValueError as error:
            raise UserError(
                f"the model's generation_config cannot be applied, generation_config={LIBRARYS!r} ignores it: {error}"
            ) from error

    @property
    def params(self) -> Mapping[str, Any]:
        found, general = self._named, GenerationConfig._get_default_generation_params()
        if self._model.generation_config.do_sample:
            return {name: general[name] for name in _SAMPLING} | found
        found.pop("temperature", None)  # without do_sample, generate() is greedy and ignores the temperature
        return found

    @property
    def served(self) -> Mapping[str, Any]:
        return {**vars(self._model.generation_config).get("gguf_sampling", {}), **self.params}

    @property
    def _named(self) -> dict[str, Any]:
        """Values set in the generation config."""
        config = self._model.generation_config
        found = {name: getattr(config, name) for name in _OWN} | {"stop": config.stop_strings}
        found = {name: value for name, value in found.items() if value is not None}
        read, valid = self._checked
        if found != read:
            valid = part(SamplingParams(**found), found)
            self._checked = found, valid
        return dict(valid)

    def processors(
        self, params: SamplingParams, input_ids: Tensor, custom: Sequence[LogitsProcessor] = ()
    ) -> LogitsProcessorList:
        config, length = copy.copy(self._model.generation_config), input_ids.shape[1]
        for name in (*_OWN, "do_sample"):
            setattr(config, name, getattr(params, name))
        config.min_p, config.min_new_tokens = params.min_p or None, params.min_new_tokens or None
        assert params.max_new_tokens is not None
        config.max_length = length + params.max_new_tokens
        if config.min_new_tokens is not None:
            config.min_length = length + config.min_new_tokens
        ends, device = config.eos_token_id, input_ids.device
        ended = None if ends is None else torch.tensor(ends, dtype=torch.long, device=device).reshape(-1)
        config._eos_token_tensor = ended
        return self._model._get_logits_processor(  # type: ignore[operator]
            config,
            input_ids_seq_length=length,
            encoder_input_ids=input_ids,
            logits_processor=LogitsProcessorList([*additive(params, length), *custom]),
            device=device,
        )

    def others(self) -> list[str]:
        neutral = self.complete(SamplingParams(temperature=0.0, repetition_penalty=1.0, min_new_tokens=0))
        return [type(one).__name__ for one in self.processors(neutral, torch.zeros(1, 1, dtype=torch.long))]


def refuse_other_modes(config: GenerationConfig, assistant_model: Any = None) -> None:
    """Raise ``UserError`` unless a generation config requests greedy search, sampling, or assisted generation, which
    yields the same tokens."""
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        asked = str(mode.value).replace("_", " ")
        raise UserError(f"generation must be greedy search or sampling: got {asked}, use model.generate for it")
