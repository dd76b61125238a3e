"""Medusa and Hydra draft what plain loops over published tensors do, on every kind of target, in every layout."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmspec import SamplingParams, UserError, plugins
from mmspec.drafters.medusa import Hydra, Medusa, MedusaNetwork
from mmspec.drafters.registry import make_drafter
from tests.medusa import COPIES, HEADS, LAYOUTS, check_heads, published, write
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import text_inputs, vision_inputs


def drafter_of(folder, layout, config, tensors):
    """A drafter read from a folder; trees of three children per node."""
    drafter = make_drafter(str(write(folder, layout, config, tensors)))
    assert type(drafter) is (Hydra if layout.startswith("hydra") else Medusa)
    drafter.top_k = 3
    return drafter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_have_the_probabilities_of_a_plain_loop(layout, tmp_path):
    config, tensors = published(layout)
    drafter = drafter_of(tmp_path, layout, config, tensors)
    check_heads(layout, tensors, shared_model("llama"), text_inputs(3), drafter, skip=(1, 4))


@pytest.mark.parametrize("layout", ["medusa", "hydra"])
def test_nodes_while_sampling(layout, tmp_path):
    config, tensors = published(layout)
    params = SamplingParams(temperature=1.0)
    drafter = drafter_of(tmp_path, layout, config, tensors)
    check_heads(layout, tensors, shared_model("llama"), text_inputs(2), drafter, params=params, new=8)


@pytest.mark.parametrize(
    ("layout", "name"), [("medusa", "qwen2_5_vl"), ("hydra", "llava"), ("hydra-prefix", "qwen2_5_vl")]
)
def test_nodes_after_images(layout, name, tmp_path):
    config, tensors = published(layout)
    drafter = drafter_of(tmp_path, layout, config, tensors)
    check_heads(layout, tensors, shared_model(name), vision_inputs(name, 2), drafter, new=8)


@pytest.mark.parametrize(("layout", "name"), [("medusa", "qwen3_5_text"), ("hydra", "bamba"), ("hydra", "lfm2")])
def test_nodes_of_hybrids(layout, name, tmp_path):
    config, tensors = published(layout)
    drafter = drafter_of(tmp_path, layout, config, tensors)
    check_heads(layout, tensors, shared_model(name), text_inputs(3), drafter, new=8)


def test_a_file_may_have_more_heads_than_its_configuration_says(tmp_path):
    config, tensors = published("medusa")
    drafter = make_drafter(str(write(tmp_path, "medusa", {**config, "medusa_num_heads": 1}, tensors)))
    assert drafter.network.config.heads == HEADS


def test_a_target_may_have_more_tokens_than_the_heads(tmp_path):
    config, tensors = published("hydra")
    tensors = {name: value[:90] if "lm_head" in name else value for name, value in tensors.items()}
    drafter, model = make_drafter(str(write(tmp_path, "hydra", config, tensors))), shared_model("llama")
    drafter.attach(plugins.target_class(model.config)(model))
    assert torch.equal(drafter.draft_ids, torch.arange(90))


@pytest.mark.parametrize("layout", ["medusa", "hydra-prefix"])
def test_shapes_at_full_size(layout):
    """Those of Vicuna-7B."""
    shape, tensors, _, verifier = kind(layout).convert(*published(layout, 5, LlamaConfig()), "here")
    with torch.device("meta"):
        expected = MedusaNetwork(shape).state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in expected.items()}
    assert (shape.heads, shape.head, verifier["vocab_size"]) == (5, 32000, 32000)
    if shape.prefix:
        assert (shape.layer.heads, shape.layer.kv_heads, shape.layer.head_dim, shape.layer.mlp) == (32, 32, 128, 11008)


# ---------------------------------------------------------------------- refusals


def kind(layout):
    return Hydra if layout.startswith("hydra") else Medusa


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_missing_further_or_misshapen_is_named(layout):
    config, tensors = published(layout)
    kind(layout).convert(config, tensors, "here")
    for name, value in tensors.items():
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        cases = [({**tensors, f"{name}.more": value}, f"unknown {name}.more")]
        if name == "token_map":
            cases += [({**tensors, name: bad}, "token_map must be") for bad in (value[:1].repeat(2), value + 90)]
        elif name in COPIES or (layout, name) == ("vllm-shared", "lm_heads.0.weight"):
            cases.append(({**tensors, name: value[:, :-1]}, f"{name} must be "))
        else:
            cases += [(rest, f"missing {name}"), ({**tensors, name: value[:-1]}, f"{name} must be ")]
            cases.append(({**tensors, name: value.int()}, f"{name} must be a floating point tensor"))
        for changed, said in cases:
            with pytest.raises(UserError, match=said) as caught:
                kind(layout).convert(config, changed, "here")
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("medusa", {"medusa_num_heads": 4}, r"missing 3\.0\.linear\.bias"),
        ("medusa", {"medusa_num_layers": 3}, r"missing 0\.2\.linear\.bias"),
        ("medusa", {"medusa_num_heads": "many"}, r"num_heads must be a whole number in \[1, 64\]: got 'many'"),
        ("vllm", {"medusa_fc_bias": True}, r"missing blocks\.0\.layers\.0\.bias"),
        ("vllm", {"logit_scale": 2.0}, r"logit_scale must be a number in \[1, 1\]: got 2"),
        ("vllm-map", {"vocab_size": None}, "token_map must be a 1D integer tensor of distinct tokens below 0"),
        ("hydra", {"hydra_head_arch": "eagle-attn"}, "head_arch must be 'mlp' or 'prefix-mlp': got 'eagle-attn'"),
        ("hydra", {"hidden_state_offset": 1}, r"hidden_state_offset must be a whole number in \[0, 0\]: got 1"),
        ("hydra", {"grounded_heads": False}, r"unknown hydra_mlp\.0\.0\.res_connection\.bias"),
    ],
)
def test_configurations_that_cannot_be_are_refused_by_name(layout, changes, said):
    config, tensors = published(layout)
    with pytest.raises(UserError, match=said) as caught:
        kind(layout).convert({**config, **changes}, tensors, "here")
    assert "\n" not in str(caught.value)


def test_targets_that_do_not_fit_are_refused(tmp_path):
    drafter = make_drafter(str(write(tmp_path, "medusa", *published("medusa"))))
    shape = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 2}
    other = LlamaForCausalLM(LlamaConfig(hidden_size=32, **shape))
    with pytest.raises(UserError, match="hidden size 48 and 101 tokens: got LlamaForCausalLM with hidden size 32"):
        drafter.attach(plugins.target_class(other.config)(other))
    drafter = make_drafter(str(write(tmp_path / "prefix", "hydra-prefix", *published("hydra-prefix"))))
    other = LlamaForCausalLM(LlamaConfig(hidden_size=48, head_dim=8, **shape))
    with pytest.raises(UserError, match=r"queries and keys of widths \[48, \d+\]: the target has \[16, 16\]"):
        drafter.attach(plugins.target_class(other.config)(other))


@pytest.mark.parametrize("layout", ["medusa", "hydra"])
@pytest.mark.parametrize("other", ["msd", "eagle3", "dflash", "medusa", "hydra"])
def test_other_drafters_do_not_read_heads(layout, other, tmp_path):
    if layout != other:
        with pytest.raises(UserError) as caught:
            make_drafter(f"{other}:{write(tmp_path, layout, *published(layout))}")
        assert "\n" not in str(caught.value)
        if other == "msd":
            assert f"{layout.title()} heads: use {layout}:" in str(caught.value)
