"""Native MTP drafts what its layers say without a cache, and what transformers drafts with them."""

import copy
import json
from functools import partial
from itertools import accumulate

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import mmspec
from mmspec import SamplingParams, UserError, ops, plugins
from mmspec.cli import main
from mmspec.drafters import mtp as drafters_mtp
from mmspec.drafters.mtp import MTP, SPEC
from mmspec.drafters.registry import make_drafter
from mmspec.ops import kernels
from tests import mtp
from tests.mmspec.drafters.test_drafters import assert_equal, check_paths, target_of
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
    tensors = mtp.mtp_tensors(model)
    folder = mtp.write_target(tmp_path / "target", model, tensors, shards)
    drafter = make_drafter("mtp", str(folder))
    assert isinstance(drafter, MTP)
    drafter.top_k = 3
    return folder, drafter, tensors


@pytest.mark.parametrize(("name", "layers"), mtp.LAYERS)
def test_trees_of_several_layers(name, layers, tmp_path):
    """A level per layer, in a batch whose rows are padded; some steps are not drafted."""
    model, built = mtp.dense(name, layers)
    drafter = make_drafter("mtp", str(mtp.published(tmp_path, name, layers)))
    drafter.top_k, gain = 3, partial(mtp.gain_of, built, model)
    check_paths(model, text_inputs(3, 9), drafter, gain, nodes=7, depth=layers, skip=(2, 4), new=10)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_layers_are_many(length, tmp_path):
    model, _ = mtp.dense("deepseek_v3", 3)
    drafter = make_drafter("mtp", str(mtp.published(tmp_path, "deepseek_v3", 3)))
    assert_equal(model, drafter, text_inputs(1, length), num_draft_tokens=9)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_layers_that_transformers_has_no_configuration_of(name, tmp_path):
    """As Mellum's: full attention, with experts where the target has them."""
    model = copy.deepcopy(shared_model(name))
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    built = mtp.mtp_model(model)
    del model.config.num_mtp_layers, model.config.mtp_layer_types
    folder = mtp.write_target(tmp_path, model, mtp.published_tensors(built, None))
    drafter, gain = make_drafter("mtp", str(folder)), partial(mtp.gain_of, built, model)
    check_paths(model, text_inputs(2, 9), drafter, gain, nodes=7, depth=1, new=10)


@pytest.mark.parametrize(
    ("name", "images", "shards"), [("qwen3_5_text", False, True), ("qwen3_5", True, False), ("qwen3_5", False, False)]
)
def test_trees_of_a_batch(name, images, shards, tmp_path):
    model, params = shared_model(name), SamplingParams(temperature=1.0) if images else None
    _, drafter, _ = native(tmp_path, name, shards)
    mtp.check_mtp(model, inputs_of(name, 3, images), drafter, skip=(1, 4), new=8, params=params)


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
    tensors = {name: torch.zeros_like(value) for name, value in mtp.mtp_tensors(model).items()}
    tensors["mtp.fc.weight"][:, : config.hidden_size] = torch.eye(config.hidden_size)
    folder = mtp.write_target(tmp_path, model, tensors)
    inputs = text_inputs(2)
    options = dict(do_sample=False, max_new_tokens=29, eos_token_id=None, pad_token_id=0, nodes=20)
    out = mmspec.generate(
        loaded(folder, "qwen3_5_text"), drafter="mtp", return_dict_in_generate=True, **inputs, **options
    )
    assert all(stats.mean_acceptance_length == 7 for stats in out.stats)  # six levels and the bonus token


def test_drafts_choose_from_the_frequent_tokens_unless_the_last_ones_are_others(tmp_path, monkeypatch):
    monkeypatch.setattr(drafters_mtp, "DRAFT_VOCABULARY", 24)
    monkeypatch.setattr(drafters_mtp, "_RECENT", 20)
    model, sizes, steps = shared_model("qwen3_5_text"), [], []
    _, drafter, _ = native(tmp_path, "qwen3_5_text")
    best, observe = ops.top_log_probs, MTP.observe

    def watched(self, tree, verdict, output):
        steps.append([token for _, row in verdict.host for token in row])
        observe(self, tree, verdict, output)

    monkeypatch.setattr(ops, "top_log_probs", lambda x, k: (sizes.append(x.shape[-1]), best(x, k))[1])
    monkeypatch.setattr(MTP, "observe", watched)
    assert_equal(model, drafter, text_inputs(2), num_draft_tokens=1)
    mean = lambda share, step: share + sum((token >= 24) - share for token in step) / 20  # noqa: E731
    expected = [24 if share <= 1 / 8 else model.config.vocab_size for share in accumulate(steps, mean, initial=0.0)]
    assert sizes == expected[: len(sizes)]
    assert len(set(sizes)) == 2
    half = model.config.vocab_size // 2  # not of smaller vocabularies, nor with static shapes
    for frequent, static, found in ((half, False, True), (half, True, False), (half + 1, False, False)):
        monkeypatch.setattr(drafters_mtp, "DRAFT_VOCABULARY", frequent)
        monkeypatch.setattr(kernels, "static_shapes", lambda device, static=static: static)
        drafter.attach(target_of("qwen3_5_text"))
        assert (drafter._frequent is not None) == found


def test_a_folder_without_the_layer_is_one_line(tmp_path, capfd):
    folder = tmp_path / "target"
    shared_model("qwen3_5_text").save_pretrained(folder)
    capfd.readouterr()  # a progress bar
    assert main(["generate", "A red", "--model", str(folder), "--drafter", "mtp"]) == 2
    line = f"error: {folder}: expected the checkpoint of a target with native MTP layers, received none\n"
    assert capfd.readouterr().err == line
    with pytest.raises(UserError, match="mtp needs a checkpoint: expected mtp:FOLDER"):
        make_drafter("mtp")
    with pytest.raises(UserError, match=r"tiny-llava: expected the checkpoint of a target with native MTP layers"):
        make_drafter("mtp", plugins.model_path("tiny-llava"))


def test_layers_that_cannot_draft_trees_are_refused(tmp_path):
    model = copy.deepcopy(shared_model("inkling_text"))
    model.config.num_mtp_layers = 2
    folder = mtp.write_target(
        tmp_path / "inkling", model, {"model.mtp.layers.0.input_proj.weight": torch.zeros(48, 96)}
    )
    with pytest.raises(UserError, match=r"MTP layers must be full or sliding-window .* inkling_text are hybrid$"):
        make_drafter("mtp", str(folder))
    folder = mtp.write_target(tmp_path / "kimi", shared_model("kimi_linear"), {"mtp.fc.weight": torch.zeros(48, 96)})
    with pytest.raises(UserError, match=r"expected a model with MTP layers, received kimi_linear without any$"):
        make_drafter("mtp", str(folder))


def test_missing_further_and_misshapen_tensors_are_named(tmp_path):
    """Which ones is for transformers' loading: the layer's last ones, and one of each kind."""
    model = shared_model("qwen3_5_text")
    tensors, folder = mtp.mtp_tensors(model), mtp.write_target(tmp_path, model, {})
    name, value = "mtp.layers.0.self_attn.q_proj.weight", tensors["mtp.layers.0.self_attn.q_proj.weight"]
    for changed, message in (
        ({name: None}, "exactly the tensors of its MTP layers, received missing layers.0.mtp_block.self_attn.q"),
        ({"mtp.norm.weight": None}, "received missing layers.0.post_norm.weight"),
        ({"mtp.fc.bias": torch.zeros(2)}, "received unknown layers.0.eh_proj.bias"),
        ({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(2)}, "received unknown layers.1.mtp_block.mlp.up_proj.weight"),
        ({name: value[:, 1:].clone()}, rf"of shape \({len(value)}, 47\), not \({len(value)}, 48\)"),
        ({"mtp.norm.weight": torch.zeros(48, dtype=torch.int32)}, "must be a floating point tensor: got torch.int32"),
    ):
        mtp.write_target(folder, model, {key: one for key, one in (tensors | changed).items() if one is not None})
        with pytest.raises(UserError, match=message) as caught:
            make_drafter("mtp", str(folder))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 1 for its MTP layer: got 2"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings must be False .*: got True"),
        ({"num_attention_heads": 8}, r"o_proj.weight of shape \(48, 96\), not \(48, 192\)"),
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
    with pytest.raises(
        UserError, match=r"for target \(model_type qwen3_5_text\): got LlamaForCausalLM with model_type \['llama'\]"
    ):
        drafter.attach(target_of("llama"))
    assert SPEC.recognises(folder)
    assert all(isinstance(make_drafter(spec), MTP) for spec in (f"mtp:{folder}", str(folder)))
