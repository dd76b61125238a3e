"""Speculative decoding in transformers' ``generate``: the same arguments and tokens, fewer forward passes.

``model.generate(**inputs, custom_generate=mmspec.decode, drafter=d)`` uses everything that ``generate`` prepares:
processors, criteria, generation config, image inputs. ``mmspec.generate(model, drafter=d, **inputs)`` is equivalent.
"""

from __future__ import annotations

import functools
import warnings
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from mmspec import plugins
from mmspec.cache.tree_cache import CACHE_NAMES, cache_in
from mmspec.core.target import Prompt
from mmspec.drafters.registry import chosen_drafter, make_drafter
from mmspec.engine.request import num_draft_tokens_of
from mmspec.engine.sequence import DecodeRequest, Delta, Sequence
from mmspec.engine.stats import Stats
from mmspec.engine.stopping import JointCriteria, logits_by_step, scores_of, stopping_of
from mmspec.errors import UserError, shown
from mmspec.pipeline import Pipeline
from mmspec.sampling.defaults import LIBRARYS, refuse_other_modes
from mmspec.sampling.processors import copy_for_row
from mmspec.sampling.sampler import Sampler
from mmspec.targets.support import base_model, refuse_learned_prompts


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output with ``return_dict_in_generate=True``: ``sequences``, one ``Stats`` per row, and on request ``scores`` and
    ``logits``, which are zeros at rows that have ended. ``cache`` (``past_key_values`` before transformers 5.24) is the
    cache that the caller passed."""

    stats: list[Stats] | None = None


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: abc.Sequence[Any],
    stopping_criteria: abc.Sequence[Any],
    generation_config: GenerationConfig,
    drafter: Any = "auto",
    num_draft_tokens: int | None = None,
    nodes: int | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    raw_inputs: dict[str, Any] | None = None,
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """The decoding method for ``generate(custom_generate=...)``.

    Args:
        drafter: as for ``mmspec.load``. A ``Drafter`` object keeps its learned state between calls; the ``Pipeline`` of
            the model also keeps tree sizes and captured graphs. With arguments of assisted generation
            (``assistant_model``, ``use_mtp``, ...), ``"auto"`` is the drafter that they select.
        num_draft_tokens: draft tokens per step; None chooses the number that is expected to be fastest. ``nodes`` is an
            alias.
        streamer: receives token by token (batch 1), without the prompt.
        tokenizer: the model's tokenizer, for an assistant with a different tokenizer; not needed for stop strings here.
        assistant_model: draft model: a language or vision-language model, a DFlash drafter or a Gemma-4 assistant.
        assistant_tokenizer: the assistant's tokenizer if it differs from the model's.
        raw_inputs: arguments of ``generate``, for draft models, including images that ``generate`` has already encoded.
            An empty cache among them is filled as by ``generate``, at the cost of another prefill.

    Returns:
        (batch, length) int64, prompt and new tokens, padded on the right as by ``generate``, or ``SpeculativeOutput``.

    Raises:
        UserError: a generation mode other than greedy search and sampling, a request for hidden states or attentions, a
            cache that is not empty, or an unsupported model or processor.
    """
    try:
        _refuse_unsupported(generation_config, model_kwargs, assistant_model)
        # peft's wrapper overrides the method of the wrapped model.
        refuse_learned_prompts(getattr(model.prepare_inputs_for_generation, "__self__", model))
        num_draft_tokens = num_draft_tokens_of(num_draft_tokens, nodes)
        home, tokenizers = model.config.name_or_path or "", (tokenizer, assistant_tokenizer)
        drafter = chosen_drafter(drafter, generation_config, assistant_model, tokenizers, home)
        if streamer is not None and len(input_ids) > 1:
            raise UserError(f"a streamer takes one sequence: got a batch of {len(input_ids)}")
        prompt = _prompt(input_ids, model_kwargs, raw_inputs if generation_config.num_return_sequences == 1 else None)
        scored, logits = (
            bool(generation_config.return_dict_in_generate and wanted)
            for wanted in (generation_config.output_scores, generation_config.output_logits)
        )
        pad = getattr(generation_config, "_pad_token_tensor", None)
        padding = 0 if pad is None else int(pad)
        alone = len(input_ids) == 1  # a single row uses the caller's own processors
        scoring = [copy_for_row(processor, 0) for processor in logits_processor if scored and alone] or logits_processor
        stopper, joint = stopping_of(stopping_criteria, input_ids, padding, scoring if scored else None)
        sampler = Sampler(logits_processor, do_sample=bool(generation_config.do_sample), copies=not alone)
        options: dict[str, Any] = {"streams": joint is not None or streamer is not None, "logits": scored or logits}
        requests = [
            DecodeRequest(row, sampler, stopper, num_draft_tokens, index, generator, **options)
            for index, (row, generator) in enumerate(
                zip(prompt.rows(), sampler.generators(len(input_ids)), strict=True)
            )
        ]
        pipe = _pipeline(model, drafter)
        rows = _decode(pipe, requests, joint, streamer)
    finally:
        if streamer is not None:
            streamer.end()  # also after an error: the streamer's reader would block for ever
    sequences = _join(input_ids, rows, padding) if joint is None else joint.ids
    past = cache_in(raw_inputs or {})
    if past is not None:
        with pipe.engine.paused():
            _fill(model, input_ids, sequences, model_kwargs)
    if not generation_config.return_dict_in_generate:
        return sequences
    output = SpeculativeOutput(sequences=sequences, stats=[row.stats for row in rows])  # type: ignore[arg-type]
    setattr(output, next(name for name in CACHE_NAMES if hasattr(type(output), name)), past)
    if scored or logits:
        own = [row.logits[: row.stats.num_generated_tokens] for row in rows]
        steps = logits_by_step(own, sequences.shape[1] - input_ids.shape[1])
        if logits:
            output.logits = steps  # type: ignore[assignment]
        if scored and joint is not None and joint.scores is not None:
            output.scores = joint.scores  # type: ignore[assignment]
        elif scored:
            output.scores = tuple(  # type: ignore[assignment]
                scores_of(list(step), sequences[:, : number - len(steps)], scoring) for number, step in enumerate(steps)
            )
    return output


@torch.no_grad()
def _fill(model: Any, input_ids: Tensor, sequences: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Fill the caller's cache as ``generate`` does, with keys and values of all tokens except the last.

    Decoding uses other caches, so this takes one pass over the prompt and one over the answer.
    """
    if plugins.layer_class(model.config.get_text_config()) is not None:
        warnings.warn("the cache given stays empty: layers with states cannot fill it in one pass", stacklevel=4)
        return
    output = model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs))
    if new := sequences.shape[1] - input_ids.shape[1] - 1:
        options = model._update_model_kwargs_for_generation(output, model_kwargs, num_new_tokens=new)
        options |= {"next_sequence_length": new, "is_first_iteration": False}
        model(**model.prepare_inputs_for_generation(sequences[:, :-1], **options))


def _decode(
    pipe: Pipeline, requests: abc.Sequence[DecodeRequest], joint: JointCriteria | None, streamer: Any
) -> list[Sequence]:
    """Decode all rows of a prompt until they end, or until joint criteria end them: rows may run ahead of others then,
    and so beyond their end."""
    new: SimpleQueue[Delta] = SimpleQueue()
    with pipe.engine.together():
        rows = [pipe.submit(request, new.put) for request in requests]
    try:
        running = len(rows) if joint is None else 0
        while running:
            delta = new.get()
            for token in delta.token_ids if streamer is not None else ():
                streamer.put(torch.tensor([token], dtype=torch.long))
            if delta.error is not None:
                raise delta.error
            running -= delta.finish_reason is not None
        while joint is not None and not joint.over:
            new.get()
            joint.advance([row.token_ids for row in rows], [row.logits for row in rows])
            pipe.engine.remove(rows[number] for number in joint.ended)
            for number in joint.lacking([row.token_ids for row in rows]):
                if (error := rows[number].error) is not None:
                    raise error
        if joint is not None:
            with pipe.engine.paused():  # a running step counts tokens of removed rows
                for row, length in zip(rows, joint.lengths, strict=True):
                    row.stats.num_generated_tokens = length
    finally:
        pipe.engine.remove(rows)
    return rows


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    drafter: Any = "auto",
    num_draft_tokens: int | None = None,
    nodes: int | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    stop_strings: str | abc.Sequence[str] | None = None,
    stopping_criteria: abc.Sequence[Any] = (),
    **arguments: Any,
) -> SpeculativeOutput | Tensor:
    """``model.generate`` with speculation.

    Args:
        inputs: (batch, length) int64, the prompt; also accepted as ``input_ids``.
        model: a transformers model, or a peft wrapper of one.
        generation_config: as for ``model.generate``.
        drafter, num_draft_tokens, nodes: as for ``decode``.
        tokenizer: tokenizer for ``stop_strings``.
        streamer: streamer of transformers; receives token by token (batch 1).
        **arguments: further arguments of ``model.generate``, including arguments of assisted generation.

    Raises:
        UserError: as for ``decode``; stop strings without a tokenizer.
    """
    if not isinstance(base_model(model), PreTrainedModel):
        raise UserError(f"model must be a model of transformers: got {shown(model)}")
    criteria = StoppingCriteriaList(stopping_criteria)
    if stop_strings:
        if tokenizer is None:
            raise UserError("stop_strings need the tokenizer: none was given")
        criteria.append(
            StopStringCriteria(tokenizer, [stop_strings] if isinstance(stop_strings, str) else list(stop_strings))
        )
    own = {name: arguments.pop(name, None) for name in ("assistant_model", "assistant_tokenizer")}
    own |= {"drafter": drafter, "num_draft_tokens": num_draft_tokens, "nodes": nodes}
    own |= {"streamer": streamer, "tokenizer": tokenizer, "raw_inputs": dict(arguments)}

    def method(model: PreTrainedModel, input_ids: Tensor, **keywords: Any) -> SpeculativeOutput | Tensor:
        if streamer is not None:
            streamer.put(input_ids.cpu())
        return decode(model, input_ids, **own, **keywords)

    arguments |= {"generation_config": generation_config, "stopping_criteria": criteria, "custom_generate": method}
    positional = () if inputs is None else (inputs,)  # BLIP's first parameter has another meaning
    return model.generate(*positional, **arguments)  # type: ignore[operator]


def _hand_over(extract: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``GenerationMixin._extract_generation_mode_kwargs`` to pass streamer, tokenizer and assistant to ``decode``.

    transformers silently drops them for custom functions, and a reader of the streamer would block for ever. Other
    custom functions receive unchanged arguments.
    """

    @functools.wraps(extract)
    def wrapper(
        self: Any, custom_generate: Any, kwargs: Any, synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        kept = {name: kwargs.get(name) for name in ("tokenizer", "assistant_tokenizer")}
        kept |= {"streamer": streamer, "assistant_model": assistant_model, "raw_inputs": dict(kwargs)}
        passed = extract(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        function = custom_generate
        while isinstance(function, functools.partial):
            function = function.func
        if function is decode:
            passed |= {name: value for name, value in kept.items() if value is not None}
        return passed

    return wrapper


if hasattr(GenerationMixin, "_extract_generation_mode_kwargs"):  # a private method: a release may lack it
    GenerationMixin._extract_generation_mode_kwargs = _hand_over(  # type: ignore[method-assign]
        GenerationMixin._extract_generation_mode_kwargs
    )


def _prompt(input_ids: Tensor, model_kwargs: dict[str, Any], raw_inputs: dict[str, Any] | None) -> Prompt:
    mask = model_kwargs.get("attention_mask")
    own = ("input_ids", "inputs", "attention_mask", *model_kwargs)
    skipped = ("attention_mask", *CACHE_NAMES, "use_cache", "logits_to_keep")
    embeds = model_kwargs.get("inputs_embeds")
    return Prompt(
        input_ids if embeds is None else input_ids.new_zeros(embeds.shape[:2]),
        None if mask is None or bool(mask.all()) else mask,
        {name: value for name, value in model_kwargs.items() if name not in skipped and value is not None},
        media={name: x for name, x in (raw_inputs or {}).items() if isinstance(x, Tensor) and name not in own},
        history=None if embeds is None else input_ids,
    )


def _pipeline(model: PreTrainedModel, drafter: Any) -> Pipeline:
    if not isinstance(drafter, Pipeline):
        target = plugins.target_class(model.config)(model)
        drafter = make_drafter(drafter, model.config.name_or_path or "")
        return Pipeline(target, drafter=drafter, generation_config=LIBRARYS)  # generate() applies model defaults
    if drafter.model is not model:
        raise UserError(f"a pipeline as drafter must hold the model that generates: it holds {drafter.name}")
    return drafter


def _join(input_ids: Tensor, rows: list[Sequence], padding: int) -> Tensor:
    longest = max(len(row.token_ids) for row in rows)
    new = [row.token_ids + [padding] * (longest - len(row.token_ids)) for row in rows]
    return torch.cat([input_ids, torch.tensor(new, dtype=torch.long, device=input_ids.device)], dim=1)


def _refuse_unsupported(config: GenerationConfig, model_kwargs: dict[str, Any], assistant_model: Any) -> None:
    refuse_other_modes(config, assistant_model)
    wanted = [
        name
        for name in ("output_hidden_states", "output_attentions")
        if getattr(config, name, None) and config.return_dict_in_generate
    ]
    if wanted:
        raise UserError(f"sequences, scores, logits and stats are returned: {', '.join(wanted)} cannot be")
    past = cache_in(model_kwargs)
    if past is None or not past.layers:
        return
    attends = any(isinstance(layer, CacheLayerMixin) for layer in past.layers)
    if held := past.get_seq_length() if attends else past.has_previous_state():
        raise UserError(f"the cache given must be empty: it holds {f'{held} tokens' if attends else 'a state'}")
