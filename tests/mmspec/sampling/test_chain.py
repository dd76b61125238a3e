"""Chains of logits processors and their keys."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from mmspec.sampling.defaults import processors, signature
from mmspec.sampling.params import SamplingParams


def test_repetition_is_penalised_or_rewarded() -> None:
    scores = torch.ones(1, 4)
    for penalty in (0.5, 2.0):
        chain = processors(SamplingParams(max_new_tokens=4, repetition_penalty=penalty))
        assert chain(torch.tensor([[2]]), scores.clone())[0].tolist() == [1, 1, 1 / penalty, 1]
    assert not processors(SamplingParams(max_new_tokens=4, repetition_penalty=1.0))


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        (hf.SequenceBiasLogitsProcessor, {(5,): 2.0}, {(5,): 3.0}),
        (hf.SequenceBiasLogitsProcessor, {(5,): 2.0}, {(6,): 2.0}),
        (hf.SuppressTokensLogitsProcessor, [3, 4], [3, 5]),
        (hf.RepetitionPenaltyLogitsProcessor, 1.5, 1.6),
    ],
)
def test_processors_with_equal_settings_have_equal_keys(kind: type, value: object, other: object) -> None:
    assert signature([kind(value)]) == signature([kind(value)])
    assert signature([kind(value)]) != signature([kind(other)])
