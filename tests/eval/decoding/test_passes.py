"""Times and divergences of passes."""

from __future__ import annotations

import pytest
import torch

from mmspec.eval.decoding.passes import divergence, ratio
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import shared_model


def test_divergence_is_the_mean_over_tokens_of_kl() -> None:
    target = TransformersTarget(shared_model("llama"))
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        own = target.model(ids).logits
    assert divergence(target, own, ids) == pytest.approx(0.0, abs=1e-7)
    assert divergence(target, own + 5.0, ids) == pytest.approx(0.0, abs=1e-5)  # the same distribution
    exact = torch.randn_like(own)
    p, q = exact.double().softmax(-1), own.double().softmax(-1)
    assert divergence(target, exact, ids) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


def test_ratios_are_of_calls_in_the_same_round() -> None:
    assert ratio({"a": [4.0, 5.0, 8.0], "b": [6.0, 12.0, 14.0]}, "b", "a") == 1.75
