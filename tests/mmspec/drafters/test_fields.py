"""Fields of drafter checkpoints: each by each set to what it must not be."""

import json
import math
import re
import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmspec import UserError
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import drafter_specs, make_drafter
from mmspec.targets.transformers_target import TransformersTarget
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.drafters import NETWORKS, tiny_drafter
from tests.tiny.models import text_inputs

_WRONG = ("text", None, [], {}, 1.5, True, -1, 0, 10**9, 10**30, math.nan, math.inf, -math.inf, [1], {"a": 1})
_HARMLESS = [("reads", []), ("sliding", [1]), ("causal", []), ("causal", [1]), ("mask_token_id", None), ("prefix", {})]
_ROOM = 200_000_000  # bytes that a refusal may take at most


def _recycle(target):
    drafter = Recycle(top_k=3)
    output = target.prefill(prompt_of(text_inputs(1, 9)), 8)
    drafter.begin(prompt_of(text_inputs(1, 9)), output, [[5]])
    return drafter


_PARTS = ("eagle", "msd", "vispec", "medusa")  # configured as FLASH and Hydra, or by fewer fields
_SAVED = [spec.name for spec in drafter_specs() if spec.weights in ("optional", "required") and spec.name not in _PARTS]
_MORE = {"flash": {"slots": 3, "visual_states": True}, "hydra": {"prefix": True}, "mamba": {"vocab": 101}}


@pytest.fixture(scope="module", params=_SAVED)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target = TransformersTarget(shared_model("llama"))
    kind, made = request.param, _recycle(target)
    if kind != "recycle":
        made = tiny_drafter(kind, target.model, 20, **_MORE.get(kind, {}))
    made.save(folder, target)
    return folder


def _paths(config):
    """Every field, nested ones too, as the keys that lead to it."""
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in _paths(value))


def _changed(config, path, change):
    config = json.loads(json.dumps(config))
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return config


def _refused(folder, read=make_drafter):
    """The line with which a checkpoint is refused, or nothing where it is accepted."""
    try:
        read(folder)
    except UserError as error:
        return str(error)
    return ""


def _cases(config):
    for path in _paths(config):
        yield path, "missing", _changed(config, path, lambda inner, key: inner.pop(key))
        yield (*path[:-1], "extra"), "extra", _changed(config, path, lambda inner, key: inner.update(extra=1))
        for value in _WRONG:
            yield path, value, _changed(config, path, lambda inner, key, value=value: inner.update({key: value}))


def test_every_field_with_every_wrong_value(saved, tmp_path):
    """One line, at once, with hardly any memory; what is accepted is a value of the field's type."""
    folder = Path(shutil.copytree(saved, tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    assert _refused(folder) == ""
    read = type(make_drafter(folder)).from_checkpoint
    before, began = psutil.Process().memory_info().rss, time.process_time()
    count = 0
    for path, value, changed in _cases(config):
        (folder / "config.json").write_text(json.dumps(changed))
        if path == ("mmspec_drafter",):
            continue
        line = _refused(folder, read)
        assert len(line.splitlines()) <= 1
        optional = path[0] == "network" and path[-1] not in ("hidden_size", "heads", "kv_heads", "head_dim", "mlp")
        named = re.search(rf"expected (a )?{path[-1]}, received none", line)
        assert value != "missing" or path[0] == "network" or not line or named, line
        harmless = (value == "missing" and optional) or type(value) in (bool, int, float, str)
        harmless = harmless or (path[-1], value) in _HARMLESS
        harmless = harmless or (path[-1] == "rope" and isinstance(value, dict))  # transformers ignores unknown keys
        assert line or harmless, (path, value)
        huge = type(value) in (int, float) and not abs(value) < 2**30
        assert line or not huge or path[-1] == "rope_theta", (path, value)
        count += 1
    assert count > 50
    assert psutil.Process().memory_info().rss - before < _ROOM
    assert time.process_time() - began < 0.5 * count


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([5, 101]),
        torch.tensor([-1, 5]),
        torch.tensor([5, 5]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([[1, 2]]),
        torch.tensor(3),
        torch.tensor([], dtype=torch.long),
    ],
)
def test_draft_ids_that_are_no_tokens(saved, tmp_path, ids):
    folder = Path(shutil.copytree(saved, tmp_path / "drafter"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"draft_ids": ids}, folder / "model.safetensors")
    assert "draft_ids" in _refused(folder)


def test_every_tensor_missing_of_another_shape_or_type(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "drafter"))
    tensors = load_file(folder / "model.safetensors")
    read = type(make_drafter(folder)).from_checkpoint
    for name, tensor in tensors.items():
        if name == "draft_ids":
            continue
        other = tensor.int() if tensor.is_floating_point() else tensor.float()
        for instead in ({}, {name: tensor[:-1].clone()}, {name: other}, {name: tensor, "more": tensor.clone()}):
            rest = {key: value for key, value in tensors.items() if key != name}
            save_file(rest | instead, folder / "model.safetensors")
            line = _refused(folder, read)
            assert len(line.splitlines()) == 1, (name, list(instead))
            assert ("more" if "more" in instead else name) in line, line


@pytest.mark.parametrize("text", ["", "[]", "3", '"text"', "null", "{", "[" * 100_000, '{"a":' * 100_000, "\x00"])
@pytest.mark.parametrize("name", ["msd", "mamba", "recycle", "flash", "eagle"])
def test_files_that_are_no_json_objects(tmp_path, name, text):
    (tmp_path / "config.json").write_text(text)
    for drafter in (str(tmp_path), f"{name}:{tmp_path}"):
        with pytest.raises(UserError) as raised:
            make_drafter(drafter)
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["ngram", "small", 5, ["msd"], "nobody"])
def test_names_of_drafters_that_have_no_checkpoint(saved, tmp_path, name):
    folder = Path(shutil.copytree(saved, tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mmspec_drafter": name}))
    assert len(_refused(folder).splitlines()) == 1


def test_settings_of_a_caller_are_checked_too():
    target = TransformersTarget(shared_model("llama"))
    for settings in ({"top_k": 10**9}, {"depth": 0}, {"total_tokens": "many"}, {"depth": 2.5}, {"top_k": True}):
        for name in NETWORKS:
            with pytest.raises(UserError, match=r"must be a whole number in \[1, \d+\]: got"):
                tiny_drafter(name, target.model, **settings)
