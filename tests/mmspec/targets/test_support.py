"""Checkpoints of models that do not hold exactly the weights of their class."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmspec
from mmspec import UserError
from tests.model_folders import save_text_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def _change(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.update({"extra.weight": torch.zeros(2)}), "but extra.weight is not one of them$"),
        (lambda w: w.update({f"extra.{i}": torch.zeros(2) for i in range(9)}), r"but extra.0 is not .* and 6 more$"),
        (lambda w: w.pop("model.norm.weight"), "but model.norm.weight is missing$"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"but model.norm.weight has shape \(3,\), not"),
    ],
)
def test_weights_too_many_too_few_and_of_other_shapes(folder, change, expected):
    _change(folder, change)
    for load in (lambda: mmspec.load(str(folder), None), lambda: mmspec.load(drafter=f"small:{folder}")):
        with pytest.raises(UserError, match=expected):
            load()


def test_weights_that_transformers_knows_to_ignore(folder):
    _change(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}))
    assert mmspec.load(str(folder), None).generate("Describe", max_new_tokens=2).token_ids


def test_a_state_spaces_checkpoint_in_its_own_format(tmp_path):
    """As state-spaces/mamba2-130m is published: no model type, and other names."""
    own = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}, "rms_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(UserError, match=r"^cannot load model .*expected the folder of a supported model") as raised:
        mmspec.load(str(tmp_path), None)
    assert "\n" not in str(raised.value)
