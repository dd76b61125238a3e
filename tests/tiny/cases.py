"""Comparison of speculative output with plain decoding on the tiny models: models, settings and drafters.

Random weights are a hard test: the outputs have no pattern that could hide a wrong position, mask or history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec.checking.oracle import Oracle
from mmspec.core.drafter import Drafter
from tests.tiny.configs import HYBRID_CONFIGS, TEXT_CONFIGS, VISION_CONFIGS
from tests.tiny.drafters import NETWORKS, tiny_drafter, tiny_drafters
from tests.tiny.models import text_inputs, text_model, vision_inputs, vision_model

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition-penalty": {"repetition_penalty": 1.4},
    "no-repeat-ngram": {"no_repeat_ngram_size": 2},
    "min-new-tokens": {"min_new_tokens": 12, "suppress_tokens": [5, 6, 7]},
    "sampled": {"do_sample": True},
    "sampled-filtered": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.4},
}
MODELS = (*TEXT_CONFIGS, *HYBRID_CONFIGS, *VISION_CONFIGS)

DRAFTERS = ("oracle", *(name for name in tiny_drafters() if name not in NETWORKS))
DRAFTERS_WITH_WEIGHTS = tuple(NETWORKS)
"""Drafters with a network, here with random weights; they work on all vision models and on llama and bamba."""


@dataclass(frozen=True)
class Case:
    """One comparison: model, inputs (``batch``, ``images``, ``length``, ``seed``), setting and drafter."""

    model: str
    batch: int
    images: int
    length: int
    seed: int
    setting: str
    drafter: str


def case_inputs(case: Case) -> dict[str, Tensor]:
    """The model inputs of a case."""
    if case.model in VISION_CONFIGS:
        return vision_inputs(case.model, case.batch, case.images, case.seed)
    return text_inputs(case.batch, case.length, case.seed)


def build_model(name: str) -> Any:
    """A tiny random model by its name in ``MODELS``."""
    return vision_model(name) if name in VISION_CONFIGS else text_model(name)


def make_drafter(model: Any, case: Case, references: list[list[int]]) -> Drafter | None:
    """The drafter of a case; ``references`` are the new tokens of each row, for the oracle."""
    if case.drafter == "oracle":
        return Oracle(references, vocab=90, seed=case.seed)
    return tiny_drafter(case.drafter, model)


def compare_case(
    model: Any, case: Case, new_tokens: int, reference: Tensor | None = None
) -> tuple[Tensor, tuple[int, int] | None]:
    """Decode a case plainly and speculatively.

    Greedy outputs are compared with transformers' ``generate``, sampled ones with our own plain decoding with the same
    seed: drafting must not change a single token.

    Args:
        model: the case's model.
        new_tokens: output length.
        reference: the output of plain decoding, if already known.

    Returns:
        The output of plain decoding, (batch, length), and row and new token of the first difference, or None.
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
            reference = ours(None) if options["do_sample"] else generate(model, case.batch, **inputs, **options)
        start = inputs["input_ids"].shape[1]
        tokens = ours(make_drafter(model, case, reference[:, start:].tolist()))
    if torch.equal(reference, tokens):
        return reference, None
    width = min(reference.shape[1], tokens.shape[1])
    unequal = (reference[:, :width] != tokens[:, :width]).nonzero().tolist()
    row, column = min(unequal, key=lambda index: index[1]) if unequal else (0, width)
    return reference, (row, column - start)


def generate(model: Any, batch: int, **options: Any) -> Tensor:
    """The output of transformers' ``generate``."""
    if hasattr(model, "_setup_cache"):  # the modules of RecurrentGemma keep the states of the last call
        model._setup_cache(model.config, batch, model.device, model.dtype)
    tokens: Tensor = model.generate(**options)
    return tokens
