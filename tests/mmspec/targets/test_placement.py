"""Dispatched models against the same model on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mmspec
from mmspec.targets.support import computing_devices, input_device, is_split
from tests.split_models import PROMPTS, answers, save_head, save_model

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *(f"model.layers.{i}" for i in range(4)))
MAPS = {
    "layers": {part: "disk" if part in ("model.layers.1", "model.layers.3") else "cpu" for part in PARTS},
    "ends": {part: "disk" if part in ("model.embed_tokens", "lm_head") else "cpu" for part in PARTS},
    "all": {"": "disk"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("head"))


@pytest.mark.parametrize("name", MAPS)
def test_a_dispatched_model_gives_the_same_tokens(name: str, folder: Path, head: Path) -> None:
    for drafter in ("recycle", str(head)):
        plain = mmspec.load(folder, drafter, "cpu", "float32")
        pipe = mmspec.load(folder, drafter, dtype="float32", device_map=MAPS[name])
        assert is_split(pipe.model)
        assert any(weight.is_meta for weight in pipe.model.parameters()), "nothing was offloaded"
        assert answers(pipe) == answers(plain)


def test_a_dispatched_model_object_gives_the_tokens_of_generate(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=MAPS["layers"])
    words = mmspec.load(folder, None, "cpu", "float32").hf_processor
    pipe = mmspec.load(model, "recycle", processor=words)
    ids = words(PROMPTS[0], return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert pipe.generate(PROMPTS[0], max_new_tokens=12, num_draft_tokens=7).token_ids == expected.tolist()


def test_auto_on_one_device_leaves_the_model_whole(folder: Path) -> None:
    pipe = mmspec.load(folder, None, dtype="float32", device_map="auto")
    assert not is_split(pipe.model)
    assert computing_devices(pipe.model) == {str(input_device(pipe.model))}


def test_where_a_dispatched_model_computes(folder: Path) -> None:
    model = mmspec.load(folder, None, device_map=MAPS["all"]).model
    assert model.device.type == "meta"
    assert input_device(model) == torch.device("cpu")
    assert computing_devices(model) == {"cpu"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8", "device_map": "auto"}, "packed weights .* stay on one device: .* got 'int8'"),
        ({"device": "cpu", "device_map": "auto"}, "device_map places the model: expected device 'auto'"),
        ({"device_map": "auto", "tp_plan": "auto"}, "either dispatched or sharded"),
        ({"device_map": "balance"}, "device_map must be .*: got 'balance'"),
        ({"tp_plan": "auto"}, "over the ranks of a job: .*, got 1 rank"),
    ],
)
def test_refusals(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(mmspec.UserError, match=message):
        mmspec.load(folder, None, **options)
