"""EAGLE-4 heads, with a sliding window and candidates of a low-rank product, against plain loops over their tensors."""

from __future__ import annotations

import pytest
import torch

from mmspec import SamplingParams, UserError
from mmspec.drafters import layouts as published
from mmspec.drafters.eagle3 import Eagle3
from mmspec.drafters.registry import make_drafter
from mmspec.ops import kernels
from mmspec.targets.packing import pack_drafter
from tests.eagle3 import EAGLE4, GEMMA4, LLAMA3, PEAGLE, VOCAB, check_head, cut, head_tensors, write_head
from tests.tiny import shared_model
from tests.tiny.models import eagle3_network, text_inputs, vision_inputs

WINDOW = {"sliding_window": 5}
HEAD = cut(EAGLE4, [0, 1, 2], **WINDOW, num_candidates=9, draft_vocab_size=VOCAB)
SLIDING = {"layer_types": ["sliding_attention"] * 2, **WINDOW}


def in_layer(config, **changes):
    return {**config, "transformer_layer_config": {**config["transformer_layer_config"], **changes}}


CASES = {
    "EAGLE-4": (HEAD, [0, 1, 2]),
    "EAGLE-3 with a window": (in_layer(cut(GEMMA4, [0, 1, 2], num_hidden_layers=2), **SLIDING), [0, 1, 2]),
    "P-EAGLE with a window": (in_layer(cut(PEAGLE, [0, 1]), **SLIDING), [0, 1]),
}


def convert(config, tensors):
    return Eagle3.convert(config, tensors, "here")


def load(tmp_path, config, layout="C"):
    tensors = head_tensors(config, layout)
    drafter = make_drafter(str(write_head(tmp_path, config, tensors)))
    assert isinstance(drafter, Eagle3)
    assert drafter.network.config.window == 5
    drafter.top_k = 3
    return drafter, tensors


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_nodes_have_the_probabilities_of_plain_loops(name, static, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    config, reads = CASES[name]
    drafter, tensors = load(tmp_path, config, "C" if name == "EAGLE-4" else "B")
    check_head(shared_model("llama"), text_inputs(3), drafter, config, tensors, reads, skip=(4,), new=8)


@pytest.mark.parametrize("name", ["llava", "qwen3_5_text"])
def test_nodes_after_images_and_of_hybrids_while_sampling(name, tmp_path):
    drafter, tensors = load(tmp_path, HEAD)
    inputs = vision_inputs(name, 2) if name == "llava" else text_inputs(2)
    params = SamplingParams(temperature=1.0)
    check_head(shared_model(name), inputs, drafter, HEAD, tensors, [0, 1, 2], new=6, params=params)


@pytest.mark.parametrize("given", [{"num_candidates": 30}, {"candidate_head": {"num_candidates": 30}}])
def test_candidates_are_the_configurations(given, tmp_path):
    config = {name: value for name, value in HEAD.items() if name != "num_candidates"}
    tensors = head_tensors(config, "C")
    network = convert({**config, **given}, tensors)[0]
    assert (network.candidates, network.head_rank, network.window, network.reads) == (30, 20, 5, [0, 1, 2])
    assert convert(config, tensors)[0].candidates == VOCAB  # 256 at most
    folder = write_head(tmp_path, {**config, **given}, tensors)
    assert published.recognise(folder) == "eagle3"


@torch.no_grad()
def test_candidates_are_scored_exactly_beside_packed_weights():
    network = eagle3_network(shared_model("llama"), head=40, head_rank=20, candidates=9)
    state = torch.randn(2, 3, 48, dtype=torch.bfloat16)
    exact = state.float() @ network.lm_head.weight.bfloat16().float().T
    pack_drafter(network, state, "bfloat16")
    found = network.retrieve(state)
    kept = found > -torch.inf
    assert bool((kept.sum(-1) == 9).all())
    torch.testing.assert_close(found[kept].float(), exact[kept], atol=2e-2, rtol=1e-2)


# ---------------------------------------------------------------------- what is refused


def test_every_missing_and_every_further_tensor_is_named():
    tensors = head_tensors(HEAD, "C")
    quantised = {f"efficient_lm_head.{part}" for part in ("g_idx", "qweight", "qzeros", "scales")}
    for name in tensors:
        rest = {other: value for other, value in tensors.items() if other != name}
        with pytest.raises(UserError, match=rf"here: expected exactly .* layout eagle3, received missing {name}$"):
            convert(HEAD, rest)
    for name in ("efficient_lm_head.bias", "fc.bias", "layers.0.mlp.experts.0.up_proj.weight"):
        with pytest.raises(UserError, match=f"received unknown {name}$"):
            convert(HEAD, tensors | {name: torch.zeros(1)})
    rest = {name: value for name, value in tensors.items() if name != "efficient_lm_head.weight"}
    with pytest.raises(UserError, match=f"missing efficient_lm_head.weight; unknown {', '.join(sorted(quantised))}$"):
        convert(HEAD, rest | dict.fromkeys(quantised, torch.zeros(1)))


@pytest.mark.parametrize("name", ["efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"])
def test_wrong_shapes_and_types_are_named(name):
    tensors = head_tensors(HEAD, "C")
    right = tuple(tensors[name].shape)
    with pytest.raises(UserError, match=rf"{name} must be \({right[0]}, {right[1]}\) by config.json: got"):
        convert(HEAD, tensors | {name: torch.zeros(right[0], right[1] + 1)})
    with pytest.raises(UserError, match=f"{name} must be a floating point tensor: got torch.int8"):
        convert(HEAD, tensors | {name: tensors[name].char()})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**HEAD, "num_candidates": 0}, "num_candidates must be a whole number >= 1: got 0"),
        ({**HEAD, "sliding_window": 0}, "sliding_window must be a whole number >= 1: got 0"),
        ({**HEAD, "layer_types": ["sliding_attention"], "sliding_window": None}, "sliding_window must be a whole num"),
        (
            in_layer(cut(GEMMA4, num_hidden_layers=2), layer_types=["sliding_attention", "full_attention"]),
            r"layer_types must be all sliding_attention or none: got \['sliding_attention', 'full_attention'\]",
        ),
    ],
)
def test_configurations_that_cannot_be_are_refused(config, message):
    with pytest.raises(UserError, match=message) as caught:
        convert(config, head_tensors(config, "C"))
    assert "\n" not in str(caught.value)


def test_the_targets_window_in_a_flat_configuration_of_eagle3_is_not_read():
    config = {**cut(LLAMA3), **SLIDING}
    assert convert(config, head_tensors(config))[0].window == 0
