"""Speculative decoding inside transformers' own ``generate``: the same arguments, the same tokens, fewer passes.

``model.generate(**inputs, custom_generate=mmspec.decode, drafter=d)`` keeps everything that ``generate`` prepares:
processors, criteria, generation config, image inputs. ``generate`` keeps its streamer and stop strings from a custom
function, so ``mmspec.generate`` brings these along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria, StopStringCriteria

from mmspec import plugins
from mmspec.engine import Row
from mmspec.engine import decode as run_engine
from mmspec.errors import UserError
from mmspec.loading import make_drafter
from mmspec.pipeline import Pipeline, budget_for
from mmspec.sampling import Sampler
from mmspec.stats import Stats
from mmspec.stopping import Stopper
from mmspec.target import Prompt


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What ``return_dict_in_generate=True`` returns: ``sequences`` and one ``Stats`` per row."""

    stats: list[Stats] | None = None


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    drafter: Any = "auto",
    nodes: int | None = None,
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """The decoding method for ``generate(custom_generate=...)``.

    Args:
        drafter: whatever ``mmspec.load`` takes as one. Pass a ``Drafter`` object to keep what it learns between calls,
            or the ``Pipeline`` that holds the model to keep all that calls prepare: tree sizes, captured graphs.
        nodes: drafted nodes per step; None takes as many as are expected to be fastest.

    Returns:
        (batch, length) int64, prompt and new tokens, padded on the right as by ``generate``, or ``SpeculativeOutput``.

    Raises:
        UserError: beams, returned scores or hidden states, ``inputs_embeds``, a cache that is already filled, or a
            model or processor that speculation cannot serve exactly.
    """
    return _run(
        model, input_ids, logits_processor, stopping_criteria, generation_config, drafter, nodes, None, model_kwargs
    )


def generate(
    model: PreTrainedModel,
    *,
    drafter: Any = "auto",
    nodes: int | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    stopping_criteria: Sequence[Any] = (),
    **inputs: Any,
) -> SpeculativeOutput | Tensor:
    """``model.generate`` with speculation, streamers and stop strings.

    Args:
        tokenizer: needed for ``stop_strings``.
        streamer: a transformers streamer, fed token by token (batch 1, as there).
        **inputs: everything else that ``model.generate`` takes.

    Raises:
        UserError: as ``decode``; stop strings without a tokenizer.
    """
    criteria = StoppingCriteriaList(stopping_criteria)
    if stop_strings:
        if tokenizer is None:
            raise UserError("stop_strings need the tokenizer: none was given")
        criteria.append(
            StopStringCriteria(tokenizer, [stop_strings] if isinstance(stop_strings, str) else list(stop_strings))
        )

    def method(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> SpeculativeOutput | Tensor:
        return _run(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            drafter,
            nodes,
            streamer,
            model_kwargs,
        )

    return model.generate(**inputs, stopping_criteria=criteria, custom_generate=method)  # type: ignore[operator]


def _run(
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    config: GenerationConfig,
    drafter: Any,
    nodes: int | None,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> SpeculativeOutput | Tensor:
    _refuse_unsupported(config, input_ids, model_kwargs)
    pipe = _pipeline(model, drafter)
    mask = model_kwargs.get("attention_mask")
    skipped = ("attention_mask", "past_key_values", "cache_params", "use_cache", "logits_to_keep")
    prompt = Prompt(
        input_ids,
        None if mask is None or bool(mask.all()) else mask,
        {name: value for name, value in model_kwargs.items() if name not in skipped and value is not None},
        padding_in_history=True,
    )
    stopper = _stopper(criteria, input_ids.shape[1])
    budget = budget_for(pipe.target, pipe.drafter, nodes, input_ids.shape[0], pipe.budgets)
    sampler = Sampler(processors, do_sample=bool(config.do_sample))
    if streamer is not None:
        streamer.put(input_ids.cpu())
    rows: list[Row] = []
    for rows in run_engine(pipe.target, pipe.drafter, prompt, sampler, stopper, budget):
        if streamer is not None:
            for token in rows[0].emitted:
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    sequences = _join(input_ids, rows, config)
    if not config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(sequences=sequences, stats=[row.stats for row in rows])  # type: ignore[arg-type]


def _pipeline(model: PreTrainedModel, drafter: Any) -> Pipeline:
    if not isinstance(drafter, Pipeline):
        target = plugins.target_class(model.config)(model)
        return Pipeline(target, make_drafter(drafter, model.config.name_or_path or ""))
    if drafter.model is not model:
        raise UserError(f"a pipeline as drafter must hold the model that generates: it holds {drafter.name}")
    return drafter


def _join(input_ids: Tensor, rows: list[Row], config: GenerationConfig) -> Tensor:
    longest = max(len(row.token_ids) for row in rows)
    pad = getattr(config, "_pad_token_tensor", None)
    pad_id = 0 if pad is None else int(pad)
    new = [row.token_ids + [pad_id] * (longest - len(row.token_ids)) for row in rows]
    return torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], dim=1)


def _stopper(criteria: Sequence[Any], prompt_length: int) -> Stopper:
    """transformers' criteria; length and end-of-sequence are told apart, as they need no call per token."""
    limits = [c.max_length - prompt_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    eos = [int(t) for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.flatten()]
    others = [c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    return Stopper(min(limits), eos_token_ids=eos, criteria=others)


def _refuse_unsupported(config: GenerationConfig, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    if (config.num_beams or 1) > 1:
        raise UserError(f"num_beams must be 1: speculation keeps one sequence per prompt, got {config.num_beams}")
    wanted = [
        name
        for name in ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
        if getattr(config, name, None) and config.return_dict_in_generate
    ]
    if wanted:
        raise UserError(f"only sequences and stats are returned: {', '.join(wanted)} cannot be")
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        raise UserError("the prompt must be given as input_ids: inputs_embeds were given")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise UserError(f"past_key_values must be empty: the cache given holds {past.get_seq_length()} tokens")
    past = model_kwargs.get("cache_params")
    if past is not None and past.has_previous_state():
        raise UserError("cache_params must be empty: the cache given holds a state")
