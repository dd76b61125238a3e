"""P-EAGLE drafts all levels in one pass: every node against plain loops over the published tensors."""

from __future__ import annotations

import pytest

from mmspec import SamplingParams, UserError, plugins
from mmspec.drafters.eagle3 import Eagle3
from mmspec.drafters.registry import make_drafter
from mmspec.ops import kernels
from tests.eagle3 import PEAGLE, PEAGLE_FLAT, check_head, cut, head_tensors, write_head
from tests.tiny import shared_model
from tests.tiny.models import text_inputs, vision_inputs

CASES = {
    "B": (cut(PEAGLE, [0, 1, 2], num_hidden_layers=2), "B", True),
    "B-norms": (cut(PEAGLE, [0, 1], fc_norm=True, norm_output=True), "B", True),
    "A": (cut(PEAGLE_FLAT), "A", False),
}
LAYERS = {"B": [0, 1, 2], "B-norms": [0, 1], "A": [0, 1, 2]}


def head(tmp_path, name):
    config, layout, embedding = CASES[name]
    tensors = head_tensors(config, layout, embedding=embedding)
    drafter = make_drafter(str(write_head(tmp_path, config, tensors)))
    assert isinstance(drafter, Eagle3)
    assert drafter.network.config.mask_token_id == (98 if name == "A" else 99)
    drafter.top_k = 3
    return drafter, config, tensors


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_nodes_have_the_probabilities_of_plain_loops(name, static, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    drafter, config, tensors = head(tmp_path, name)
    check_head(shared_model("llama"), text_inputs(3), drafter, config, tensors, LAYERS[name], skip=(1, 4), new=8)


def test_nodes_while_sampling(tmp_path):
    drafter, config, tensors = head(tmp_path, "B")
    params = SamplingParams(temperature=1.0)
    check_head(shared_model("llama"), text_inputs(2), drafter, config, tensors, [0, 1, 2], new=8, params=params)


@pytest.mark.parametrize("name", ["llava", "qwen3_5_text"])
def test_nodes_after_images_and_of_hybrids(name, tmp_path):
    drafter, config, tensors = head(tmp_path, "B")
    inputs = vision_inputs(name, 2) if name == "llava" else text_inputs(2)
    check_head(shared_model(name), inputs, drafter, config, tensors, [0, 1, 2], new=8)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_missing_or_misshapen_is_named(name, tmp_path):
    config, layout, embedding = CASES[name]
    tensors = head_tensors(config, layout, embedding=embedding)
    for changed, said in (
        ({"mask_hidden": tensors["mask_hidden"][0]}, r"mask_hidden must be \(1, 1, \d+\) by config.json: got"),
        ({"mask_hidden.more": tensors["mask_hidden"].clone()}, "unknown mask_hidden.more"),
    ):
        with pytest.raises(UserError, match=said):
            make_drafter(str(write_head(tmp_path, config, {**tensors, **changed})))


def test_the_mask_must_be_known_and_a_token(tmp_path):
    config, layout, embedding = CASES["B"]
    tensors = head_tensors(config, layout, embedding=embedding)
    rest = {name: tensor for name, tensor in tensors.items() if name != "mask_hidden"}
    with pytest.raises(UserError, match="missing mask_hidden"):
        make_drafter(str(write_head(tmp_path, config, rest)))
    with pytest.raises(UserError, match="mask_token_id must be a whole number >= 0: got None"):
        make_drafter(str(write_head(tmp_path, {**config, "mask_token_id": None}, tensors)))
    drafter = make_drafter(str(write_head(tmp_path, {**config, "mask_token_id": 101}, tensors)))
    model = shared_model("llama")
    with pytest.raises(UserError, match="mask_token_id must be a token below 101: got 101"):
        drafter.attach(plugins.target_class(model.config)(model))


def test_an_eagle3_head_with_a_mask_token_passes_once_per_level(tmp_path):
    config = cut(PEAGLE_FLAT)
    tensors = head_tensors(config)
    del tensors["mask_hidden"]
    assert make_drafter(str(write_head(tmp_path, config, tensors))).network.config.mask_token_id is None
