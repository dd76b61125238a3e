"""The README and the table of drafters agree with the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mmspec
from mmspec.drafters.registry import PLAIN, drafter_specs
from mmspec.eval.decoding.oracle import Oracle
from mmspec.eval.decoding.small_configs import WORDS, random_model, small_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HYBRIDS = {
    "Qwen3.5": "qwen3_5_text",
    "Qwen3-Next": "qwen3_next",
    "Nemotron-H": "nemotron_h",
    "GraniteMoeHybrid": "granitemoehybrid",
    "Falcon-H1": "falcon_h1",
    "Bamba": "bamba",
}


def test_drafters_are_those_of_the_registry() -> None:
    page = (ROOT / "docs/drafters.md").read_text()
    table = page[page.index("| drafter | draft tokens come from |") :].split("\n\n")[0]
    listed = re.findall(r"^\| `([\w-]+)(?::(\w+))?`", table, re.MULTILINE)
    assert sorted(listed) == sorted([*((spec.name, spec.argument) for spec in drafter_specs()), (PLAIN, "")])


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_that_transformers_refuses_to_assist_are_decoded(name: str) -> None:
    (listed,) = re.findall(r"recurrent layers \(([^)]+)\)", README)
    assert set(re.split(r",\s+", listed)) == set(HYBRIDS)
    model: Any = random_model(small_config(CONFIG_MAPPING[HYBRIDS[name]]), AutoModelForCausalLM)
    ids = torch.arange(5, 17)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(**inputs, prompt_lookup_num_tokens=3)
    expected = model.generate(**inputs)
    drafter = Oracle(expected[:, 12:].tolist(), vocab=WORDS)
    options = {"custom_generate": mmspec.decode, "drafter": drafter, "return_dict_in_generate": True}
    decoded = model.generate(**inputs, **options)
    assert torch.equal(decoded.sequences, expected)
    assert decoded.stats[0].mean_acceptance_length > 2
