"""Times and divergences of passes, and times by the length of the prefix."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from mmspec.eval import real
from mmspec.eval.real import divergence, ratio
from mmspec.targets.transformers_target import TransformersTarget
from tests.mmspec.targets.packed import model_of, target_of
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


def test_rows_are_medians_and_ratios_to_the_first_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9, 9, 1, 2, 3, 4, 2, 4])  # two lengths, first round not measured
    monkeypatch.setattr(
        real, "seconds_after", lambda *_: {"one": (t := next(seconds)), "tree": 3.0 * t, "prefill": 10.0 * t}
    )
    target = target_of(model_of(LlamaConfig))
    first, second = real.measure_prefixes({"int4": target}, [100, 400], rounds=3)
    assert first == {
        **{"form": "int4", "prefix": 100, "milliseconds": 2000, "tree": 6000, "passes": 3},
        **{"prefill": 5, "speed": 1, "prefill_speed": 1},
    }
    assert (second["prefix"], second["milliseconds"], second["prefill"]) == (400, 4000, 10)
    assert (second["speed"], second["prefill_speed"]) == (0.5, 2)


def test_a_prompt_and_two_sizes_of_passes_are_timed() -> None:
    target = target_of(model_of(LlamaConfig, vocab_size=2000))
    seconds = real.seconds_after(target, 12)
    assert seconds.keys() == {"prefill", "one", "tree"}
    assert min(seconds.values()) > 0
    assert target.runner.rows == 0
