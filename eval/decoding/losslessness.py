"""Token-by-token comparison of speculative output with plain decoding, over a grid of cases.

All supported architectures, tiny and randomly initialised, in float32: batches of one and three rows, several prompts,
images and lengths, logits processors, and drafters whose trees are partly accepted. Random weights are a hard test:
the outputs have no pattern that could hide a wrong position, mask or history.

Greedy outputs are compared with transformers' ``generate``. Sampled outputs are compared with our own plain decoding
with the same seed: drafting must not change a single token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec import ops
from mmspec.core.drafter import Drafter
from mmspec.eval.decoding.oracle import Oracle
from mmspec.eval.decoding.tiny_drafters import NETWORKS, tiny_drafter, tiny_drafters
from tests.tiny.configs import HYBRID_CONFIGS, TEXT_CONFIGS, VISION_CONFIGS
from tests.tiny.models import text_inputs, text_model, vision_inputs, vision_model

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition-penalty": {"repetition_penalty": 1.4},
    "no-repeat-ngram": {"no_repeat_ngram_size": 2},
    "min-new-tokens": {"min_new_tokens": 12, "suppress_tokens": [5, 6, 7]},
    "sampled": {"do_sample": True},
    "sampled-filtered": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.4},
}
ORACLE = "oracle"
TRAINED = tuple(NETWORKS)
"""Drafters with a network, here with random weights; used on all vision models and on llama and bamba."""
DRAFTERS = (ORACLE, *(name for name in tiny_drafters() if name not in TRAINED))
MODELS = (*TEXT_CONFIGS, *HYBRID_CONFIGS, *VISION_CONFIGS)


@dataclass(frozen=True)
class Case:
    """One comparison: model, inputs (``batch``, ``images``, ``length``, ``seed``), setting and drafter.

    ``eager`` selects the eager attention implementation.
    """

    model: str
    batch: int
    images: int
    length: int
    seed: int
    setting: str
    drafter: str
    eager: bool = False


@dataclass(frozen=True)
class OutputDifference:
    """The first difference between two outputs.

    Attributes:
        row, position: batch row, and index of the new token.
        margin: how close plain decoding was to another token there: the gap between the two highest raw logits, or when
            sampling, the distance in probability from the draw to the nearest other token.
    """

    case: Case
    row: int
    position: int
    margin: float


def select_cases(count: int | None = None) -> list[Case]:
    """All cases, or ``count`` of them spread evenly over the models, ordered by model."""
    every = []
    for name in MODELS:
        prompts = [(1, 8, 0), (2, 8, 1), (0, 8, 2)] if name in VISION_CONFIGS else [(0, 1, 0), (0, 9, 1), (0, 23, 2)]
        drafters = DRAFTERS + (TRAINED if name in (*VISION_CONFIGS, "llama", "bamba") else ())
        grid = itertools.product((1, 3), prompts, SETTINGS, drafters)
        for batch, (images, length, seed), setting, drafter in grid:
            fits = batch == 1 or length > batch  # each further row has one more padding token
            if fits:
                every.append(Case(name, batch, images, length, seed, setting, drafter, eager=seed == 1))
    if count is not None and count < len(every):
        order = {name: index for index, name in enumerate(MODELS)}
        drawn: dict[str, list[Case]] = {name: [] for name in order}
        for case in random.Random(0).sample(every, len(every)):
            drawn[case.model].append(case)
        alternating = [case for turn in itertools.zip_longest(*drawn.values()) for case in turn if case is not None]
        every = sorted(alternating[:count], key=lambda case: order[case.model])
    return every


def case_inputs(case: Case) -> dict[str, Tensor]:
    """The model inputs of a case."""
    if case.model in VISION_CONFIGS:
        return vision_inputs(case.model, case.batch, case.images, case.seed)
    return text_inputs(case.batch, case.length, case.seed)


def build_model(name: str) -> Any:
    """A tiny random model by its name in ``MODELS``."""
    return vision_model(name) if name in VISION_CONFIGS else text_model(name)


def make_drafter(model: Any, case: Case, references: list[list[int]]) -> Drafter | None:
    """The drafter of a case, given the output of each row."""
    if case.drafter == ORACLE:
        return Oracle(references, vocab=90, seed=case.seed)
    return tiny_drafter(case.drafter, model)


def compare_case(
    model: Any, case: Case, new_tokens: int, reference: Tensor | None = None
) -> tuple[Tensor, OutputDifference | None]:
    """Decode a case plainly and speculatively.

    Args:
        model: the case's model.
        new_tokens: output length.
        reference: the output of plain decoding, if already known.

    Returns:
        The output of plain decoding, (batch, length), and the first difference or None.
    """
    inputs: dict[str, Any] = case_inputs(case)
    options = {"do_sample": False, **SETTINGS[case.setting], "max_new_tokens": new_tokens}

    def ours(drafter: Drafter | None) -> Tensor:
        torch.manual_seed(case.seed)
        tokens = mmspec.generate(model, drafter=drafter, nodes=12, **inputs, **options)
        assert isinstance(tokens, Tensor)
        return tokens

    with torch.no_grad():
        if reference is None:
            if hasattr(model, "_setup_cache"):  # the modules of RecurrentGemma keep the states of the last call
                model._setup_cache(model.config, case.batch, model.device, model.dtype)
            reference = ours(None) if options["do_sample"] else model.generate(**inputs, **options)
        drafter = make_drafter(model, case, reference[:, inputs["input_ids"].shape[1] :].tolist())
        return reference, _first_difference(model, case, inputs, reference, ours(drafter))


def _first_difference(
    model: Any, case: Case, inputs: dict[str, Tensor], reference: Tensor, ours: Tensor
) -> OutputDifference | None:
    if torch.equal(reference, ours):
        return None
    width = min(reference.shape[1], ours.shape[1])
    unequal = (reference[:, :width] != ours[:, :width]).nonzero().tolist()
    row, column = min(unequal, key=lambda index: index[1]) if unequal else (0, width)
    position = column - inputs["input_ids"].shape[1]
    if SETTINGS[case.setting].get("do_sample", False):
        margins = sampling_margin(model, case, position)
    else:
        margins = logit_margin(model, inputs, reference[:, :column])
    return OutputDifference(case, row, position, margins[row])


def sampling_margin(model: Any, case: Case, position: int) -> list[float]:
    """Distance in probability from each row's draw at new token ``position`` to the nearest other token's interval."""
    distances: list[list[float]] = []
    sample = ops.sample

    def record_distance(scores: Tensor, uniform: Tensor) -> Tensor:
        borders = scores.double().softmax(-1).cumsum(-1)
        distances.append((borders - uniform.double()[..., None]).abs().amin(-1)[:, 0].tolist())
        return sample(scores, uniform)

    try:
        ops.sample = record_distance
        torch.manual_seed(case.seed)
        options: dict[str, Any] = {**SETTINGS[case.setting], **case_inputs(case)}
        mmspec.generate(model, drafter=None, max_new_tokens=position + 1, **options)
    finally:
        ops.sample = sample
    return distances[position]


def logit_margin(model: Any, inputs: dict[str, Tensor], ids: Tensor) -> list[float]:
    """Gap between the two highest raw logits after ``ids`` (batch, length), prompt and answer, in each row."""
    extra = ids.shape[1] - inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, extra), value=1)
    rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    if "mm_token_type_ids" in rest:
        rest["mm_token_type_ids"] = torch.nn.functional.pad(rest["mm_token_type_ids"], (0, extra))
    options = dict(max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = model.generate(input_ids=ids, attention_mask=mask, **rest, **options)
    best = out.logits[0].float().topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


def compare_cases(cases: list[Case], new_tokens: int = 24) -> Iterator[tuple[Case, OutputDifference | None]]:
    """Compare cases ordered by model, building each model and each reference output once."""
    for name, group in itertools.groupby(cases, key=lambda case: case.model):
        model = build_model(name)
        attention = model.config._attn_implementation
        references: dict[tuple[Any, ...], Tensor] = {}
        for case in group:
            model.set_attn_implementation("eager" if case.eager else attention)
            key = (case.batch, case.images, case.length, case.seed, case.setting)
            references[key], difference = compare_case(model, case, new_tokens, references.get(key))
            yield case, difference
