"""Quantisation while a checkpoint is read: weights equal to packing afterwards, and peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    modeling_utils,
)

import mmspec
from mmspec.quantisation.blocks import BlockLinear
from mmspec.targets import sources
from mmspec.targets.packing import pack_model
from tests.compiled import needs_kernels
from tests.model_folders import save_llava, save_text_model, tokenizer

pytestmark = needs_kernels


def tied(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, vocab_size=320
    )
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer(320).save_pretrained(folder)
    return folder


SAVED: dict[str, Any] = {
    "text": (save_text_model, AutoModelForCausalLM),
    "tied": (tied, AutoModelForCausalLM),
    "llava": (save_llava, AutoModelForImageTextToText),
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_streamed_weights_are_those_of_a_model_that_is_packed(name: str, kind: str, tmp_path: Path) -> None:
    """Layers with incomplete groups of features, towers, tied and untied heads."""
    save, auto_class = SAVED[name]
    folder, plain = save(tmp_path / name), modeling_utils.safe_open
    found: Any = mmspec.load(str(folder), drafter=None, dtype=kind).target.model
    expected: Any = auto_class.from_pretrained(folder, dtype="auto").eval()
    pack_model(expected, kind)
    state, wanted = found.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], value) for key, value in wanted.items())
    kinds = [{key: type(part) for key, part in model.named_modules()} for model in (found, expected)]
    assert kinds[0] == kinds[1]
    assert not any(parameter.is_meta for parameter in found.parameters())
    assert not hasattr(found.config, "quantization_config")
    assert modeling_utils.safe_open is plain  # which maps files to memory


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj", "embed_tokens", "norm"])
def test_other_weights_are_refused_while_they_stream(name: str, kind: str, tmp_path: Path) -> None:
    folder, name = save_text_model(tmp_path / "text"), f"model.{name}.weight"
    state = load_file(folder / "model.safetensors")
    for changed in ({key: x for key, x in state.items() if key != name}, state | {name: state[name][:-1].clone()}):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(mmspec.UserError, match=f"expected exactly the weights of LlamaForCausalLM, but {name}"):
            mmspec.load(str(folder), drafter=None, dtype=kind)


_PROGRAM = """
import json, sys
import mmspec
from mmspec.quantisation.blocks import BlockLinear

def peak():
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

mmspec.load(sys.argv[1], drafter=None, dtype=sys.argv[3])
before = peak()
model = mmspec.load(sys.argv[2], drafter=None, dtype=sys.argv[3]).target.model
packed = sum(part._blocks.numel() for part in model.modules() if isinstance(part, BlockLinear))
print(json.dumps({"peak": peak() - before, "packed": packed}))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_the_peak_is_the_packed_weights_and_two_layers(kind: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=8, vocab_size=320
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "large")
    tokenizer(320).save_pretrained(tmp_path / "large")
    layer = 2 * sum(x.numel() for x in LlamaForCausalLM(config).model.layers[0].parameters())
    command = [sys.executable, "-c", _PROGRAM, str(save_text_model(tmp_path / "small")), str(tmp_path / "large"), kind]
    row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert row["packed"] < row["peak"] < row["packed"] + 2 * layer + (1 << 20), (row, layer)


def test_a_model_of_a_source_has_no_rows_left(tmp_path: Path) -> None:
    source = sources.find(str(save_text_model(tmp_path / "text")))
    model, kind = source.model(AutoModelForCausalLM, source.config(), "int4", on_cpu=True)
    linear = [part for part in model.modules() if type(part) is torch.nn.Linear]
    assert all(part.weight.is_meta and len(part.stored) == 1 for part in linear)
    pack_model(model, kind)
    assert any(isinstance(part, BlockLinear) for part in model.modules())
    assert not any(hasattr(part, "stored") for part in model.modules())
