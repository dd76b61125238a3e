"""Times by the length of the prefix."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from mmspec.eval.decoding import prefixes
from tests.mmspec.targets.packed import model_of, target_of


def test_rows_are_medians_and_ratios_to_the_first_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9, 9, 1, 2, 3, 4, 2, 4])  # two lengths, first round not measured
    monkeypatch.setattr(
        prefixes, "seconds_after", lambda *_: {"one": (t := next(seconds)), "tree": 3.0 * t, "prefill": 10.0 * t}
    )
    target = target_of(model_of(LlamaConfig))
    first, second = prefixes.measure_prefixes({"int4": target}, [100, 400], rounds=3)
    assert first == {
        **{"form": "int4", "prefix": 100, "milliseconds": 2000, "tree": 6000, "passes": 3},
        **{"prefill": 5, "speed": 1, "prefill_speed": 1},
    }
    assert (second["prefix"], second["milliseconds"], second["prefill"]) == (400, 4000, 10)
    assert (second["speed"], second["prefill_speed"]) == (0.5, 2)


def test_a_prompt_and_two_sizes_of_passes_are_timed() -> None:
    target = target_of(model_of(LlamaConfig, vocab_size=2000))
    seconds = prefixes.seconds_after(target, 12)
    assert seconds.keys() == {"prefill", "one", "tree"}
    assert min(seconds.values()) > 0
    assert target.runner.rows == 0
