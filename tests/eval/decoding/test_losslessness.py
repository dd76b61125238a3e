"""The grid of losslessness cases, and that a draft which changes the output is detected."""

from collections import Counter

import pytest
import torch

from mmspec import ops
from mmspec.sampling.sampler import Sampled
from tests.tiny import shared_model
from tests.tiny.cases import (
    MODELS,
    ORACLE,
    SETTINGS,
    TRAINED,
    Case,
    case_inputs,
    compare_case,
    sampling_margin,
    select_cases,
)
from tests.tiny.configs import VISION_CONFIGS


def test_vision_models_have_all_settings_with_all_drafters_with_weights():
    found = {(c.model, c.batch, c.images, c.setting, c.drafter) for c in select_cases()}
    for name in VISION_CONFIGS:
        for drafter in TRAINED:
            assert {(name, b, i, s, drafter) for b in (1, 3) for i in (0, 1, 2) for s in SETTINGS} <= found
    others = {model for model, *_, drafter in found if drafter in TRAINED} - set(VISION_CONFIGS)
    assert others == {"llama", "bamba"}


def test_a_selection_is_spread_evenly_over_the_models():
    counts = Counter(case.model for case in select_cases(3 * len(MODELS) + 1))
    assert set(counts) == set(MODELS)
    assert sorted(counts.values()) == [3] * (len(MODELS) - 1) + [4]
    assert list(dict.fromkeys(case.model for case in select_cases(60))) == list(MODELS)
    assert len(set(select_cases(500))) == 500


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "batch", "images"), [("llava", 3, 2), ("llava_bamba", 3, 2), ("qwen2_vl", 3, 1), ("llama", 1, 0)]
)
@pytest.mark.parametrize("setting", ["greedy", "sampled", "sampled-filtered"])
def test_drafting_changes_no_token(name, batch, images, setting):
    case = Case(name, batch, images, 8, seed=5, setting=setting, drafter=ORACLE)
    reference, difference = compare_case(shared_model(name), case, new_tokens=12)
    assert difference is None
    assert reference.shape[1] > case_inputs(case)["input_ids"].shape[1] + 3


def test_sampled_outputs_differ_from_greedy_and_are_reproducible():
    case = Case("llava", 1, 1, 8, 5, "sampled", "oracle")
    answers = {
        tuple(compare_case(shared_model("llava"), Case("llava", 1, 1, 8, 5, setting, "oracle"), 12)[0][0].tolist())
        for setting in ("greedy", "sampled", "sampled-filtered")
    }
    assert len(answers) == 3
    once, again = (compare_case(shared_model("llava"), case, 12)[0] for _ in range(2))
    assert torch.equal(once, again)


def test_a_changed_draw_is_detected(monkeypatch):
    uniforms = Sampled.uniforms

    def corrupted(self, count, device):
        return uniforms(self, count, device).roll(1) if count > 1 else uniforms(self, count, device)

    monkeypatch.setattr(Sampled, "uniforms", corrupted)
    _, difference = compare_case(shared_model("llava"), Case("llava", 1, 1, 8, 5, "sampled", "oracle"), 12)
    assert difference is not None


def test_sampling_margin_is_the_distance_to_the_nearest_token(monkeypatch):
    """Three tokens with probabilities 0.25, 0.25 and 0.5."""
    draws = iter([0.4, 0.26, 0.9])

    def generate(*_, max_new_tokens, **__):
        for _ in range(max_new_tokens):
            ops.sample(torch.tensor([[[0.25, 0.25, 0.5]]]).log(), torch.tensor([[next(draws)]]))

    monkeypatch.setattr("tests.tiny.cases.mmspec.generate", generate)
    assert sampling_margin(None, Case("llama", 1, 0, 8, 5, "sampled", "msd"), 1) == pytest.approx([0.01], abs=1e-6)
