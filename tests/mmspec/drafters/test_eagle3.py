"""EAGLE-3 drafts what its network says, on every kind of target: trees against plain loops without a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

import mmspec
from mmspec import SamplingParams, UserError, plugins
from mmspec.core.budget import Budget
from mmspec.core.target import output_of
from mmspec.drafters.eagle3 import Eagle3, Eagle3Config
from mmspec.drafters.hidden_state.layer import rotary_of
from mmspec.drafters.registry import make_drafter
from tests.draft_checks import chain_of_five
from tests.eagle3 import (
    GEMMA4,
    GPT_OSS,
    LLAMA3,
    QWEN2_5_VL,
    QWEN3_VL,
    VOCAB,
    PlainHead,
    check_head,
    cut,
    head_tensors,
    states_read,
    write_head,
)
from tests.targets import prompt_of, row_of
from tests.tiny import shared_model
from tests.tiny.models import eagle3_network, text_inputs, vision_inputs

NEW = {"norm_before_residual": False, "fc_norm": True, "norm_output": True}  # EAGLE-3.1
SPECULATORS = {"norm_before_fc": True, "norm_output": True, "num_hidden_layers": 2}
CASES = {
    "A": (cut(LLAMA3), "A", [0, 1, 2]),
    "A-embedding": (cut(LLAMA3), "A", [0, 1, 2]),
    "A-3.1": (cut(LLAMA3, [2, 0, 1, 1], **NEW), "A", [2, 0, 1, 1]),
    "B": (cut(GEMMA4, [0, 1, 2]), "B", [0, 1, 2]),
    "B-two-layers": (cut(GEMMA4, [0, 1], **SPECULATORS), "B", [0, 1]),
    "C": (cut(GPT_OSS, [1, 2, 1]), "C", [1, 2, 1]),
}


def head(tmp_path, config, layout="A", embedding=False, kind="safetensors", at=""):
    """A loaded drafter, and the tensors of its checkpoint."""
    tensors = head_tensors(config, layout, embedding=embedding)
    folder = write_head(tmp_path, config, tensors, kind)
    drafter = make_drafter(f"eagle3:{folder}{at}" if at else str(folder))
    assert isinstance(drafter, Eagle3)
    drafter.top_k = 3
    return drafter, tensors


# ---------------------------------------------------------------------- the network


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("name", CASES)
def test_logits_of_every_level_are_those_of_plain_loops(name, kind, tmp_path):
    """A chain of five levels, all logits over the draft vocabulary."""
    (config, layout, reads), model = CASES[name], shared_model("llama")
    drafter, tensors = head(tmp_path, config, layout, name == "A-embedding", kind)
    inputs, first = text_inputs(1, 9), 7
    path, seen = chain_of_five(drafter, model, inputs, first)
    states, positions = states_read(model, row_of(inputs, 0), [], reads)
    plain = PlainHead(config, tensors, model.get_input_embeddings())
    tokens = torch.tensor([*inputs["input_ids"][0, 1:].tolist(), first])
    with torch.no_grad():
        expected = plain.levels(tokens, states, positions, path[:-1])
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert path == [int(plain.ids[logits.argmax()]) for logits in expected]


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_output"])
def test_switches_without_tensors_of_their_own_change_what_is_drafted(switch, tmp_path):
    trees = []
    for value in (False, True):
        config = cut(LLAMA3, **{switch: value})
        drafter, _ = head(tmp_path / str(value), config)
        model = shared_model("llama")
        target = plugins.target_class(model.config)(model)
        drafter.attach(target)
        prompt = prompt_of(text_inputs())
        target.features = drafter.features
        drafter.begin(prompt, target.prefill(prompt, 16), [[*prompt.input_ids[0].tolist(), 7]])
        trees.append(drafter.propose(torch.tensor([7]), Budget(12, 4)).log_probs)
    assert not torch.allclose(trees[0], trees[1])


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
@pytest.mark.parametrize("case", ["A", "B-two-layers"])
def test_text(name, case, tmp_path):
    (config, layout, reads), model = CASES[case], shared_model(name)
    drafter, tensors = head(tmp_path, config, layout)
    check_head(model, text_inputs(3), drafter, config, tensors, reads, skip=(1, 4))


def test_text_while_sampling(tmp_path):
    (config, layout, reads), model = CASES["A-3.1"], shared_model("llama")
    drafter, tensors = head(tmp_path, config, layout)
    check_head(model, text_inputs(3), drafter, config, tensors, reads, params=SamplingParams(temperature=1.0))


@pytest.mark.parametrize("name", ["llava", "llava_next", "llava_bamba"])
def test_images_are_placeholder_tokens(name, tmp_path):
    config, model = cut(LLAMA3, [0, 1, 1]), shared_model(name)
    drafter, tensors = head(tmp_path, config)
    check_head(model, vision_inputs(name, 3), drafter, config, tensors, [0, 1, 1], new=8)


@pytest.mark.parametrize(
    ("name", "published"), [("qwen3_vl", QWEN3_VL), ("qwen2_5_vl", QWEN2_5_VL), ("qwen2_vl", LLAMA3)]
)
def test_positions_of_images_are_the_targets_with_sections(name, published, tmp_path):
    config, model = cut(published, [1, 2, 0]), shared_model(name)
    drafter, tensors = head(tmp_path, config)
    check_head(model, vision_inputs(name, 3), drafter, config, tensors, [1, 2, 0], new=8)
    check_head(model, text_inputs(2), drafter, config, tensors, [1, 2, 0], new=6)


@pytest.mark.parametrize("name", ["bamba", "qwen3_5_text", "lfm2", "falcon_mamba"])
def test_hybrids(name, tmp_path):
    config, model = cut(LLAMA3), shared_model(name)
    layers = model.config.get_text_config().num_hidden_layers
    drafter, tensors = head(tmp_path, config)
    check_head(model, text_inputs(3), drafter, config, tensors, drafter.network.config.inputs_read(layers), new=8)


# ---------------------------------------------------------------------- the layers that are read


def test_default_layers_are_eagles():
    assert [Eagle3Config(48, 4, 4, 12, 40).inputs_read(layers) for layers in (32, 36, 2, 1)] == [
        [2, 16, 29],
        [2, 18, 33],
        [0, 1, 2],
        [0, 0, 1],
    ]


def test_layers_may_be_given_with_the_folder(tmp_path):
    config, model = cut(GPT_OSS), shared_model("qwen3_vl")
    drafter, tensors = head(tmp_path / "a", config, "C", at="@2,0,1")
    check_head(model, vision_inputs("qwen3_vl", 2), drafter, config, tensors, [2, 0, 1], new=6)
    assert drafter.features == (output_of(1), 0, 1)
    drafter, tensors = head(tmp_path / "b", config, "C", at="@outputs:0,1,0")
    check_head(model, vision_inputs("qwen3_vl", 2), drafter, config, tensors, [0, 1, 0], outputs=True, new=6)
    assert drafter.features == (output_of(0), output_of(1), output_of(0))
    for wrong in ("@1,2", "@after:1,2,3", "@1,x,3", "@"):
        with pytest.raises(UserError, match=r"reads must name 3 layers|layers to read must be as in FOLDER@2,16,29"):
            make_drafter(f"eagle3:{tmp_path / 'a'}{wrong}")


@torch.no_grad()
def test_an_output_is_read_before_visual_features_are_added_to_it():
    """Qwen3-VL adds them between its first layers."""
    model, inputs = shared_model("qwen3_vl"), vision_inputs("qwen3_vl")
    target = plugins.target_class(model.config)(model)
    target.features = (output_of(0), 1, output_of(1), 0, "last")
    output = target.prefill(prompt_of(inputs), 4)
    before, after = output.features[output_of(0)], output.features[1]
    at = output.visual[0]
    assert torch.equal(before[0, ~at], after[0, ~at])
    assert not torch.isclose(before[0, at], after[0, at]).all(-1).any()
    read, _ = states_read(model, row_of(inputs, 0), [], [0, 1], outputs=True)
    for layer in (0, 1):
        torch.testing.assert_close(output.features[output_of(layer)][0], read[layer], atol=1e-5, rtol=1e-5)


def test_layers_that_the_target_lacks_are_named(tmp_path):
    model = shared_model("llama")
    target = plugins.target_class(model.config)(model)
    drafter, _ = head(tmp_path, cut(GPT_OSS, [2, 12, 22]), "C")
    with pytest.raises(UserError, match="reads inputs of layers 2, 12, 22: the target has 2 layers"):
        drafter.attach(target)
    drafter, _ = head(tmp_path, cut(GPT_OSS), "C", at="@outputs:0,1,2")
    with pytest.raises(UserError, match="reads outputs of layers 0, 1, 2: the target has 2 layers"):
        drafter.attach(target)


def test_a_head_that_is_never_right_is_told(tmp_path):
    model = shared_model("llama")
    config = cut(LLAMA3)
    drafter, _ = head(tmp_path, config)
    inputs = text_inputs(1)
    options = dict(do_sample=False, eos_token_id=None, max_new_tokens=150, nodes=2)
    with pytest.warns(
        RuntimeWarning, match=r"of little use: 1\.\d+ tokens per step.* than 0, 1, output 1: try eagle3:"
    ):
        mmspec.generate(model, drafter=drafter, **inputs, **options)


def test_passes_without_drafts_say_nothing_about_a_head(tmp_path):
    """More of them than are watched: a warning would be an error."""
    drafter, _ = head(tmp_path, cut(LLAMA3))
    inputs = text_inputs(1)
    options = dict(do_sample=False, eos_token_id=None, max_new_tokens=150, nodes=0)
    out = mmspec.generate(shared_model("llama"), drafter=drafter, return_dict_in_generate=True, **inputs, **options)
    assert out.stats[0].num_spec_steps == 149


def test_placeholders_outside_of_the_table_are_fed_as_token_0(tmp_path):
    """Of a target whose placeholder has an id above those of the head's own embedding."""
    model = shared_model("llava")
    drafter, _ = head(tmp_path, cut(LLAMA3), embedding=True)
    target = plugins.target_class(model.config)(model)
    drafter.attach(target)
    states = torch.randn(1, 4, 3 * 48, generator=torch.Generator().manual_seed(0))
    beyond, zero = torch.tensor([[5, VOCAB, VOCAB + 9, VOCAB - 1]]), torch.tensor([[5, 0, 0, VOCAB - 1]])
    with torch.inference_mode():
        assert torch.equal(drafter.inputs(beyond, states), drafter.inputs(zero, states))


def test_rows_that_join_leave_the_positions_of_others_in_the_table(monkeypatch):
    """A video's positions exceed its tokens by far; those of a text that joins do not."""
    monkeypatch.setattr("mmspec.drafters.hidden_state.drafter.AHEAD", 1)
    model = shared_model("qwen3_vl")
    target = plugins.target_class(model.config)(model)
    drafter = Eagle3(eagle3_network(model), torch.arange(40), top_k=3, depth=3, total_tokens=9)
    drafter.attach(target)
    target.features = drafter.features
    ample = Budget(9, 3)
    ample.remaining = 99
    token = torch.tensor([5, 6])
    for number, last in ((0, 1022), (1, 11)):
        prompt = prompt_of(text_inputs(1, 12, number))
        output = target.prefill(prompt, 64)
        output.positions = torch.arange(12).expand(3, 1, 12).clone()
        output.positions[..., 6:] += last - 11
        drafter.begin(prompt, output, [[*prompt.input_ids[0].tolist(), int(token[number])]])
    assert drafter.propose(token, ample).nodes == 10


# ---------------------------------------------------------------------- whole answers


# ---------------------------------------------------------------------- checkpoints


def test_scaled_rotary_positions_are_those_of_transformers(tmp_path):
    for rope in (
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ):
        given = {**rope, "original_max_position_embeddings": 64}
        drafter, _ = head(tmp_path, cut(LLAMA3, rope_scaling=given, rope_theta=5e5))
        made = LlamaConfig(
            hidden_size=48, num_attention_heads=4, head_dim=16, rope_parameters={**given, "rope_theta": 5e5}
        )
        cos, sin = LlamaRotaryEmbedding(made)(torch.zeros(1), torch.arange(500)[None])
        rotary, axis = rotary_of(drafter.network.config)
        rotary.reserve(500, torch.zeros(1))
        ours = rotary(slice(0, 500))
        assert axis is None
        torch.testing.assert_close(ours[0][:, 0], cos[0])
        torch.testing.assert_close(ours[1][:, 0, 8:], sin[0, :, 8:])
        torch.testing.assert_close(ours[1][:, 0, :8], -sin[0, :, :8])


def test_interleaved_position_axes_are_those_of_qwen3_vl():
    """At the published size, with positions so far apart that the slowest frequencies turn."""
    config = Eagle3Config(2560, 32, 8, 128, 9728, rope={**QWEN3_VL["rope_scaling"], "rope_theta": 5e6})
    text = Qwen3VLTextConfig(head_dim=128, rope_parameters={**QWEN3_VL["rope_scaling"], "rope_theta": 5e6})
    positions = torch.tensor([[[0, 70_000, 5]], [[3, 10, 90_000]], [[60_000, 11, 2]]])
    cos, sin = Qwen3VLTextRotaryEmbedding(text)(torch.zeros(1), positions)
    rotary, axis = rotary_of(config)
    rotary.reserve(100_000, torch.zeros(1))
    ours = rotary.by_axis(positions, axis)
    # Angles of the fastest frequencies are rounded at such positions.
    for part, tolerance in ((slice(64, 128), 2e-2), (slice(64 + 30, 128), 1e-4)):
        torch.testing.assert_close(ours[0][:, :, 0, part], cos[..., part], atol=tolerance, rtol=0)
        torch.testing.assert_close(ours[1][:, :, 0, part], sin[..., part], atol=tolerance, rtol=0)
    assert torch.equal(ours[1][..., :64], -ours[1][..., 64:])
