"""Native MTP drafts what its layer says: trees against plain loops without a cache, and transformers' own layer."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

import mmspec
from mmspec import SamplingParams, UserError, plugins
from mmspec.cli import main
from mmspec.drafters.mtp import SPEC
from mmspec.drafters.mtp.drafter import MTP
from mmspec.drafters.mtp.network import MTPNetwork
from mmspec.drafters.mtp.published import convert, network_config
from mmspec.drafters.registry import make_drafter
from tests.draft_checks import chain_of_five
from tests.model_folders import tokenizer
from tests.mtp import PlainMTP, check_mtp, entries_of, mtp_tensors, write_target
from tests.targets import row_of
from tests.tiny import shared_model
from tests.tiny.configs import GATED_DELTA_CONFIGS
from tests.tiny.models import text_inputs, vision_inputs

NAMES = ["qwen3_5_text", "qwen3_5"]


def inputs_of(name, batch=1, images=True):
    return vision_inputs(name, batch) if name == "qwen3_5" and images else text_inputs(batch)


def loaded(folder, name):
    auto = AutoModelForImageTextToText if name == "qwen3_5" else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval()


def native(tmp_path, name, shards=False):
    """A target's folder with an MTP layer, the drafter in it, and the layer's tensors."""
    model = shared_model(name)
    tensors = mtp_tensors(model)
    folder = write_target(tmp_path / "target", model, tensors, shards)
    drafter = make_drafter("mtp", str(folder))
    assert isinstance(drafter, MTP)
    drafter.top_k = 3
    return folder, drafter, tensors


# ---------------------------------------------------------------------- the network


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_level_are_those_of_plain_loops(name, shards, tmp_path):
    """A chain of five levels, all logits over the vocabulary; in the prompt, an image."""
    model = shared_model(name)
    _, drafter, tensors = native(tmp_path, name, shards)
    inputs, first = inputs_of(name), 7
    path, seen = chain_of_five(drafter, model, inputs, first)
    with torch.no_grad():
        expected = PlainMTP(model, tensors).levels(*entries_of(model, row_of(inputs, 0), [first]), path[:-1])
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert path == [int(logits.argmax()) for logits in expected]


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}])
def test_the_layer_is_transformers_own(scaling):
    """With the published heads, of which a quarter turns, and positions of an image."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    shape = dict(hidden_size=64, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2, head_dim=256)
    config = Qwen3_5TextConfig(
        **shape, layer_types=["full_attention"], num_hidden_layers=1, rope_parameters=rope | scaling
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = Qwen3_5DecoderLayer(config, 0)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.2)
    rest = {f"mtp.{name}.weight": torch.randn(size) for name, size in (("norm", 64), ("fc", (64, 128)))}
    rest |= {f"mtp.pre_fc_norm_{name}.weight": torch.randn(64) for name in ("embedding", "hidden")}
    tensors = rest | {f"mtp.layers.0.{name}": value for name, value in layer.state_dict().items()}
    ours = network_config(config, "here")
    network = MTPNetwork(ours)
    network.load_state_dict(convert(tensors, ours))
    drafter = MTP(network)
    x, positions = torch.randn(2, 5, 64), torch.randint(0, 300, (3, 2, 5))
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = layer(x, Qwen3_5TextRotaryEmbedding(config)(x, positions), attention_mask=mask)
        drafter._rotary.reserve(300, x)
        rotation = drafter._rotary.by_axis(positions, drafter._axis)

        def attend(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        torch.testing.assert_close(network.layer(x, rotation, attend), expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize(("name", "images"), [("qwen3_5_text", False), ("qwen3_5", True), ("qwen3_5", False)])
def test_trees_of_a_batch(name, images, tmp_path):
    model = shared_model(name)
    _, drafter, tensors = native(tmp_path, name)
    check_mtp(model, inputs_of(name, 3, images), drafter, tensors, skip=(1, 4), new=10)


def test_trees_while_sampling(tmp_path):
    model = shared_model("qwen3_5")
    _, drafter, tensors = native(tmp_path, "qwen3_5")
    check_mtp(model, vision_inputs("qwen3_5", 2), drafter, tensors, params=SamplingParams(temperature=1.0), new=8)


@torch.no_grad()
def test_a_layer_that_predicts_the_target_is_accepted(tmp_path):
    """Of a target that says after each token the same next one, with a layer that passes on its embedding."""
    torch.manual_seed(0)
    config = GATED_DELTA_CONFIGS["qwen3_5_text"]()
    model = AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        mixer = layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
        mixer.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight.normal_()
    tensors = {name: torch.zeros_like(value) for name, value in mtp_tensors(model).items()}
    tensors["mtp.fc.weight"][:, : config.hidden_size] = torch.eye(config.hidden_size)
    folder = write_target(tmp_path, model, tensors)
    inputs = text_inputs(2)
    options = dict(do_sample=False, max_new_tokens=29, eos_token_id=None, pad_token_id=0, nodes=20)
    out = mmspec.generate(
        loaded(folder, "qwen3_5_text"), drafter="mtp", return_dict_in_generate=True, **inputs, **options
    )
    assert all(stats.mean_acceptance_length == 7 for stats in out.stats)  # six levels and the bonus token


# ---------------------------------------------------------------------- folders


@cache
def words() -> PreTrainedTokenizerFast:
    return tokenizer()


def text_folder(folder):
    """A whole target: weights with an MTP layer, tokenizer and generation settings."""
    config = GATED_DELTA_CONFIGS["qwen3_5_text"]()
    config.vocab_size = len(words())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    write_target(folder, model, mtp_tensors(model), shards=True)
    words().save_pretrained(folder)
    return folder


def test_the_command_line(tmp_path, capfd):
    folder = str(text_folder(tmp_path / "target"))
    asked = ["generate", "A red", "--model", folder, "--max-new-tokens", "12", "--nodes", "6", "--json"]
    answers = []
    for drafter in ("mtp", f"mtp:{folder}", folder, "none"):
        assert main([*asked, "--drafter", drafter]) == 0
        answers.append(json.loads(capfd.readouterr().out))
    assert [answer["stats"]["num_draft_tokens"] > 0 for answer in answers] == [True, True, True, False]
    assert all(answer["token_ids"] == answers[-1]["token_ids"] for answer in answers)


def test_a_folder_without_the_layer_is_one_line(tmp_path, capfd):
    folder = tmp_path / "target"
    shared_model("qwen3_5_text").save_pretrained(folder)
    assert main(["generate", "A red", "--model", str(folder), "--drafter", "mtp"]) == 2
    line = f"error: {folder}: expected the checkpoint of a target with a native MTP layer (mtp.*), received none\n"
    assert capfd.readouterr().err == line
    with pytest.raises(UserError, match="mtp needs a checkpoint: expected mtp:FOLDER"):
        make_drafter("mtp")
    with pytest.raises(UserError, match=r"tiny-llava: expected the checkpoint of a target with a native MTP layer"):
        make_drafter("mtp", plugins.model_path("tiny-llava"))


def test_a_mixture_of_experts_is_refused_by_name(tmp_path):
    for name in ("qwen3_5_moe_text", "qwen3_next"):
        folder = write_target(tmp_path / name, shared_model(name), {"mtp.fc.weight": torch.zeros(48, 96)})
        message = f"the MTP layer of a qwen3_5_text, received that of a {name}, a mixture of experts$"
        with pytest.raises(UserError, match=message):
            make_drafter("mtp", str(folder))


def test_every_missing_and_every_further_tensor_is_named(tmp_path):
    model = shared_model("qwen3_5_text")
    tensors = mtp_tensors(model)
    folder = write_target(tmp_path, model, {})
    for name in tensors:
        rest = {other: value for other, value in tensors.items() if other != name}
        write_target(folder, model, rest)
        with pytest.raises(UserError, match=f"expected exactly the tensors of an MTP layer, received missing {name}$"):
            make_drafter("mtp", str(folder))
    for name in ("mtp.fc.bias", "mtp.layers.1.mlp.up_proj.weight", "mtp.fc.weight_scale_inv"):
        write_target(folder, model, tensors | {name: torch.zeros(2)})
        with pytest.raises(UserError, match=f"received unknown {name}$"):
            make_drafter("mtp", str(folder))
    for name, value in tensors.items():
        wrong = (*value.shape[:-1], value.shape[-1] + 1)
        write_target(folder, model, tensors | {name: torch.zeros(wrong)})
        with pytest.raises(UserError) as caught:
            make_drafter("mtp", str(folder))
        assert str(caught.value) == f"{folder}: {name} must be {tuple(value.shape)} by config.json: got {wrong}"
    write_target(folder, model, tensors | {"mtp.norm.weight": torch.zeros(48, dtype=torch.int32)})
    with pytest.raises(UserError, match=r"mtp.norm.weight must be a floating point tensor: got torch.int32"):
        make_drafter("mtp", str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 1 for its MTP layer: got 2"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings must be False .*: got True"),
        ({"attn_output_gate": False}, "attn_output_gate must be True .*: got False"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu .*: got 'gelu'"),
        ({"num_attention_heads": 8}, r"o_proj.weight must be \(48, 192\) by config.json: got \(48, 96\)"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes, message, tmp_path):
    folder, _, _ = native(tmp_path, "qwen3_5_text")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message) as caught:
        make_drafter("mtp", str(folder))
    assert "\n" not in str(caught.value)
    file.write_text("{}")
    with pytest.raises(UserError, match="expected the configuration of a model") as caught:
        make_drafter("mtp", str(folder))
    assert "\n" not in str(caught.value)


def test_a_layer_of_another_target_is_refused(tmp_path):
    folder, drafter, _ = native(tmp_path, "qwen3_5_text")
    other = shared_model("llama")
    with pytest.raises(UserError, match=r"trained for target of .* of type qwen3_5_text: got LlamaForCausalLM"):
        drafter.attach(plugins.target_class(other.config)(other))
    assert SPEC.recognises(folder)
