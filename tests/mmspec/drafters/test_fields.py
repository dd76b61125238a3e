"""Fields of drafter checkpoints: each by each set to what it must not be."""

import json
import math
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmspec import UserError
from mmspec.drafters.dflash import DFlashConfig
from mmspec.drafters.eagle3 import Eagle3Config
from mmspec.drafters.medusa import MedusaConfig
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import drafter_specs, make_drafter
from mmspec.drafters.spec import RotaryShape
from mmspec.vision.drafters.msd import MSDConfig
from tests.mmspec.drafters.test_drafters import target_of
from tests.targets import prefilled, prompt_of
from tests.tiny.drafters import NETWORKS, tiny_drafter
from tests.tiny.models import text_inputs

_WRONG = ("text", None, [], {}, 1.5, True, -1, 0, 10**9, 10**30, math.nan, math.inf, -math.inf, [1], {"a": 1})
_HARMLESS = [("reads", []), ("sliding", [1]), ("causal", []), ("causal", [1]), ("mask_token_id", None), ("prefix", {})]
_ROOM = 200_000_000  # bytes that a refusal may take at most


def _recycle(target):
    drafter = Recycle(top_k=3)
    output = prefilled(target, prompt_of(text_inputs(1, 9)), 8)
    drafter.begin(prompt_of(text_inputs(1, 9)), output, [[5]])
    return drafter


_PARTS = ("eagle", "msd", "vispec", "medusa")  # configured as FLASH and Hydra, or by fewer fields
_SAVED = [spec.name for spec in drafter_specs() if spec.weights in ("optional", "required") and spec.name not in _PARTS]
_MORE = {"flash": {"slots": 3, "visual_states": True}, "hydra": {"prefix": True}, "mamba": {"vocab": 101}}


@pytest.fixture(scope="module", params=_SAVED)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target = target_of("llama")
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
        named = re.search(rf"{path[-1]} is required|expected a {path[-1]}, received none", line)
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


SHAPE = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "head_dim": 12, "mlp": 64}
HEAD = {**SHAPE, "layers": 3, "head": 40, "states": 2, "reads": [0, 5]}
BLOCKS = {**SHAPE, "layers": 2, "block_size": 5, "mask_token_id": 9, "target_layer_ids": [0, 3]}
SHAPES = {
    "layer": (RotaryShape, SHAPE),
    "head": (Eagle3Config, HEAD),
    "msd": (MSDConfig, SHAPE),
    "medusa": (MedusaConfig, {"hidden_size": 48, "heads": 3, "prefix": SHAPE}),
    "blocks": (DFlashConfig, BLOCKS),
    "window": (DFlashConfig, {**BLOCKS, "sliding": [1], "window": 7, "causal": [0]}),
    "markov": (DFlashConfig, {**BLOCKS, "markov_rank": 3, "markov_inputs": 50, "markov_outputs": 40}),
    "dflash2": (
        DFlashConfig,
        {**BLOCKS, "selector_rank": 6, "selector_tokens": 50, "selector_top_k": 49, "conv_kernel_size": 4},
    ),
}
CONTRADICTIONS = {
    "kv_heads must divide heads: got 3 for 4": [("layer", {"kv_heads": 3})],
    "head_dim must be even, as rotary positions turn pairs: got 13": [("layer", {"head_dim": 13})],
    "rotary positions must be default, linear, llama3, yarn: got 'dynamic'": [
        ("layer", {"rope": {"rope_type": "dynamic"}})
    ],
    "rotary positions must turn whole heads: got a partial": [("layer", {"rope": {"partial_rotary_factor": 0.5}})],
    "mrope_section must be three sections of 6 frequencies in all: got ": [
        ("layer", {"rope": {"mrope_section": sections}})
        for sections in ((4, 0, 2), [4, 0.0, 2], [-1, 4, 3], [2, 4], [1, 2, 2], [1, 2, 4])
    ],
    "reads must name 3 layers, from 0 on: got [0, 5]": [("head", {"states": 3})],
    "reads must name 2 layers, from 0 on: got [5, -1]": [("head", {"reads": [5, -1]})],
    "reads must name the 2 layers that the drafter was trained on: got none": [("head", {"reads": []})],
    "candidates must be given with head_rank only, and at most the 40 tokens": [
        ("head", changes) for changes in ({"head_rank": 2, "candidates": 41}, {"head_rank": 2}, {"candidates": 5})
    ],
    "one of norm_before_fc and fc_norm must be false": [("head", {"norm_before_fc": True, "fc_norm": True})],
    "one of hide_visual and latents must be off: got both, 2": [("msd", {"hide_visual": True, "latents": 2})],
    "reads must name layers, from 0 on: got [3, -1]": [("msd", {"reads": [3, -1]})],
    "rank and head must both be 0 or neither: got ": [
        ("msd", changes) for changes in ({"rank": 2, "slots": 3}, {"head": 9, "slots": 3})
    ],
    "rank must be 0 with one slot per pass: got 2": [("msd", {"rank": 2, "head": 9})],
    "prefix must have hidden_size 36: got 48": [("medusa", {"hidden_size": 36})],
    "target_layer_ids must name 1 to 64 layers of the target, from 0 on: got ": [
        ("blocks", {"target_layer_ids": ids}) for ids in ([], list(range(65)), [3, -1])
    ],
    "sliding must name layers below 2: got [0, ": [("window", {"sliding": [0, at]}) for at in (-1, 2)],
    "causal must name layers below 2: got [0, ": [("window", {"causal": [0, at]}) for at in (-1, 2)],
    "window must be given with sliding layers only: got ": [("window", {"window": 0}), ("window", {"sliding": []})],
    "markov_inputs and markov_outputs must be given with markov_rank only: got ": [
        ("markov", {name: 0}) for name in ("markov_rank", "markov_inputs", "markov_outputs")
    ],
    "markov_outputs must be the 39 rows of the head: got 40": [("markov", {"head": 39})],
    "markov_rank must be positive for a rnn Markov head: got 0": [("blocks", {"markov_type": "rnn"})],
    "markov_rank must be positive for a confidence head": [("blocks", {"confidence": "markov"})],
    "selector_top_k must be at most 50: got 51": [("dflash2", {"selector_top_k": 51})],
    "selector_tokens must be given with selector_rank only: got ": [
        ("dflash2", {name: 0}) for name in ("selector_rank", "selector_tokens")
    ],
    "selector_rank requires the target's output layer, and no heads of DSpark": [
        ("dflash2", changes) for changes in ({"head": 50}, {"confidence": "state"})
    ],
    "conv_kernel_size must be at most 5: got 6": [("dflash2", {"conv_kernel_size": 6})],
    "conv_group_size must divide 48: got 7": [("dflash2", {"conv_group_size": 7})],
    "": [  # accepted
        *((name, {}) for name in SHAPES),
        ("layer", {"kv_heads": 4, "rope": {"rope_type": "linear", "partial_rotary_factor": 1.0}}),
        ("layer", {"rope": {"mrope_section": [4, 0, 2]}}),
        ("head", {"reads": [], "states": 3}),
        ("head", {"head_rank": 2, "candidates": 40}),
        *(("head", {name: True}) for name in ("norm_before_fc", "fc_norm")),
        *(("msd", changes) for changes in ({"hide_visual": True}, {"latents": 2}, {"reads": [3, 0]})),
        ("msd", {"rank": 2, "head": 9, "slots": 2}),
        ("blocks", {"target_layer_ids": list(range(64)), "conv_group_size": 7}),
        ("blocks", {"head": 39, "confidence": "state"}),
        ("window", {"sliding": [0, 1], "causal": [1, 0], "target_layer_ids": [7]}),
        ("markov", {"confidence": "markov", "markov_type": "rnn", "head": 40}),
        ("dflash2", {"conv_kernel_size": 5, "selector_top_k": 50}),
    ],
}


@pytest.mark.parametrize(
    ("message", "name", "changes"),
    [(message, *case) for message, cases in CONTRADICTIONS.items() for case in cases],
    ids=str,
)
def test_settings_that_contradict_each_other(message, name, changes):
    kind, base = SHAPES[name]
    with pytest.raises(UserError, match=f"^{re.escape(message)}") if message else nullcontext():
        kind(**(base | changes))


def test_settings_of_a_caller_are_checked_too():
    target = target_of("llama")
    for settings in ({"top_k": 10**9}, {"depth": 0}, {"total_tokens": "many"}, {"depth": 2.5}, {"top_k": True}):
        for name in NETWORKS:
            with pytest.raises(UserError, match=r" must be (>= 1|<= \d+|a whole number): got "):
                tiny_drafter(name, target.model, **settings)
