"""Medusa and Hydra draft what plain loops over published tensors do, on every kind of target, in every layout."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmspec import SamplingParams, UserError
from mmspec.drafters.medusa import Hydra, Medusa, MedusaNetwork
from mmspec.drafters.registry import make_drafter
from tests.medusa import HEADS, LAYOUTS, check_heads, published, write
from tests.mmspec.drafters.test_drafters import target_of
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import text_inputs, vision_inputs


def drafter_of(folder, layout, config, tensors):
    drafter = make_drafter(str(write(folder, layout, config, tensors)))
    assert type(drafter) is (Hydra if layout.startswith("hydra") else Medusa)
    drafter.top_k = 3
    return drafter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_have_the_probabilities_of_a_plain_loop(layout, tmp_path):
    config, tensors = published(layout)
    drafter = drafter_of(tmp_path, layout, config, tensors)
    check_heads(layout, tensors, shared_model("llama"), text_inputs(3), drafter, skip=(1, 4))


@pytest.mark.parametrize(
    ("layout", "name"),
    [("medusa", "qwen2_5_vl"), ("hydra", "llava"), ("hydra-prefix", "qwen2_5_vl"), ("hydra", "qwen3_5_text")],
)
def test_nodes_after_images_and_of_hybrids_while_sampling(layout, name, tmp_path):
    config, tensors = published(layout)
    inputs = text_inputs(3) if name == "qwen3_5_text" else vision_inputs(name, 2)
    params, drafter = SamplingParams(temperature=1.0), drafter_of(tmp_path, layout, config, tensors)
    check_heads(layout, tensors, shared_model(name), inputs, drafter, new=8, params=params)


def test_a_file_may_have_more_heads_than_its_configuration_says(tmp_path):
    config, tensors = published("medusa")
    drafter = make_drafter(str(write(tmp_path, "medusa", {**config, "medusa_num_heads": 1}, tensors)))
    assert drafter.network.config.heads == HEADS


def test_a_target_may_have_more_tokens_than_the_heads(tmp_path):
    config, tensors = published("hydra")
    tensors = {name: value[:90] if "lm_head" in name else value for name, value in tensors.items()}
    drafter = make_drafter(str(write(tmp_path, "hydra", config, tensors)))
    drafter.attach(target_of("llama"))
    assert torch.equal(drafter.draft_ids, torch.arange(90))


@pytest.mark.parametrize("layout", ["medusa", "hydra-prefix"])
def test_shapes_at_full_size(layout):
    shape, tensors, _, verifier = (Hydra if layout.startswith("hydra") else Medusa).convert(
        *published(layout, 5, LlamaConfig()), "here"
    )
    with torch.device("meta"):
        expected = MedusaNetwork(shape).state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in expected.items()}
    assert (shape.heads, shape.head, verifier["vocab_size"]) == (5, 32000, 32000)
    if shape.prefix:
        assert (shape.layer.heads, shape.layer.kv_heads, shape.layer.head_dim, shape.layer.mlp) == (32, 32, 128, 11008)


def test_targets_that_do_not_fit_are_refused(tmp_path):
    shape = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 2}
    drafter = make_drafter(str(write(tmp_path / "prefix", "hydra-prefix", *published("hydra-prefix"))))
    other = LlamaForCausalLM(LlamaConfig(hidden_size=48, head_dim=8, **shape))
    with pytest.raises(UserError, match=r"queries and keys of widths \[48, \d+\]: the target has \[16, 16\]"):
        drafter.attach(target_of(other))
