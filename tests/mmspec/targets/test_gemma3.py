"""A real model of another family, in the formats of its file: Gemma 3 with 270M parameters, from its packages."""

from __future__ import annotations

from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import mmspec
from mmspec import plugins
from mmspec.quantisation.blocks import BlockLinear
from mmspec.targets.gguf import file_in
from mmspec.targets.merged_layers import MergedLayer
from tests.compiled import needs_kernels

missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
pytestmark = [
    pytest.mark.long,
    needs_kernels,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.skipif(not plugins.gemma3_270m.installed, reason=f"not installed: {plugins.gemma3_270m.package}"),
]
LONG = (Path(__file__).resolve().parents[3] / "CONTRIBUTING.md").read_text()[3000:6800]  # 1,064 tokens: two windows

PROMPTS = ["The capital of France is", "Q: List five animals.\nA:", "def fibonacci(n):\n", LONG]


@cache
def pipeline() -> mmspec.Pipeline:
    return mmspec.load("gemma3-270m", drafter="recycle+ngram", device="cpu")


def test_layers_have_the_formats_of_the_file() -> None:
    import gguf

    file = file_in(plugins.gemma3_270m())
    assert file is not None
    stored = Counter(one.tensor_type.name for one in gguf.GGUFReader(str(file)).tensors)
    assert stored == {"F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9}
    model = pipeline().model
    assert all(isinstance(layer, MergedLayer) and layer.native is not None for layer in model.model.layers)
    held = sum(part._blocks.numel() for part in model.modules() if isinstance(part, BlockLinear))
    assert held < 1.05 * file.stat().st_size


@pytest.mark.parametrize(
    "prompt", ["The capital of France is", "Q: List five animals.\nA:", "def fibonacci(n):\n", LONG]
)
def test_it_decodes_as_generate_does(prompt: str) -> None:
    pipe = pipeline()
    inputs = pipe.hf_processor(prompt, return_tensors="pt")
    with torch.no_grad():
        expected = pipe.model.generate(**inputs, max_new_tokens=40, do_sample=False)
    found = pipe.generate(prompt, max_new_tokens=40, nodes=8)
    assert found.token_ids == expected[0, inputs["input_ids"].shape[1] :].tolist()
    assert found.stats.mean_acceptance_length > 1.1
