"""Logits processors and samplers of sampling parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from mmspec.sampling.additive import AdditiveTerms
from mmspec.sampling.params import LIBRARY, SamplingParams
from mmspec.sampling.sampler import Constraint, Processor, Sampler

_FILTERS = (  # in the order of transformers' generate, each with the value that changes nothing
    ("temperature", 1.0, hf.TemperatureLogitsWarper),
    ("top_k", 0, hf.TopKLogitsWarper),
    ("top_p", 1.0, hf.TopPLogitsWarper),
    ("min_p", 0.0, hf.MinPLogitsWarper),
)


def sampler(
    params: SamplingParams,
    custom: Sequence[Processor],
    chain: LogitsProcessorList,
    constraint: Constraint | None = None,
) -> Sampler:
    """Sampler with these parameters.

    Args:
        custom: the request's own logits processors.
        chain: all logits processors, ``custom`` included.
        constraint: as for ``Sampler``.
    """
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
    custom: Sequence[Processor] = (),
    prompt_length: int = 0,
    eos_token_ids: Sequence[int] = (),
) -> LogitsProcessorList:
    """Logits processors in the order of transformers' ``generate``: ``custom`` ones precede the temperature.

    Args:
        prompt_length: tokens before the output.
        eos_token_ids: tokens that ``min_new_tokens`` forbids at first.
    """
    chain, params = LogitsProcessorList(), params.over(LIBRARY)
    if params.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))  # type: ignore[arg-type]
    if params.min_new_tokens and eos_token_ids:
        ends = torch.tensor(eos_token_ids)
        chain.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, ends))
    chain.extend(additive(params, prompt_length))
    chain.extend(custom)
    if params.do_sample:
        values = ((getattr(params, name), neutral, kind) for name, neutral, kind in _FILTERS)
        chain.extend(kind(value) for value, neutral, kind in values if value != neutral)
    return chain


def additive(params: SamplingParams, prompt_length: int) -> list[Processor]:
    """The logits processor of ``logit_bias``, ``presence_penalty`` and ``frequency_penalty``, if there are any."""
    terms = AdditiveTerms(params.logit_bias or (), params.presence_penalty, params.frequency_penalty, prompt_length)
    return [terms] if terms.bias or terms.counts else []


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
