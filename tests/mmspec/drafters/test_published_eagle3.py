"""EAGLE-3 checkpoints as published: what is read from them, and what is refused."""

from __future__ import annotations

import pytest
import torch

from mmspec import UserError, plugins
from mmspec.drafters import checkpoint
from mmspec.drafters import layouts as published
from mmspec.drafters.eagle3 import Eagle3, Eagle3Network
from mmspec.drafters.registry import make_drafter
from tests.eagle3 import DRAFT, GEMMA4, GPT_OSS, LLAMA3, QWEN2_5_VL, QWEN3, QWEN3_VL, cut, head_tensors, write_head
from tests.tiny import shared_model

HERE = "here"


def convert(config, tensors):
    return Eagle3.convert(config, tensors, HERE)


@pytest.mark.parametrize(
    ("config", "layout", "embedding", "parameters"),
    [
        (LLAMA3, "A", False, 424_689_664),
        (QWEN3, "A", False, 399_523_840),
        (QWEN3_VL, "A", True, 607_201_280),
        (QWEN2_5_VL, "A", False, 402_798_592),
        (GEMMA4, "B", True, 2_235_061_248),
        (GPT_OSS, "C", False, 307_641_600),
    ],
)
def test_heads_of_full_size_have_the_expected_shapes(config, layout, embedding, parameters):
    tensors = head_tensors(config, layout, embedding=embedding, device="meta")
    network, ours, draft_ids, verifier = convert(config, tensors)
    with torch.device("meta"):
        expected = {name: value.shape for name, value in Eagle3Network(network).state_dict().items()}
    assert {name: value.shape for name, value in ours.items()} == expected
    assert sum(value.numel() for value in ours.values()) == parameters
    layer = {**config, **config.get("transformer_layer_config", {})}
    assert (verifier["hidden_size"], verifier["vocab_size"]) == (layer["hidden_size"], layer["vocab_size"])
    assert network.head_dim == layer.get("head_dim", 128)
    assert torch.equal(draft_ids, torch.arange(32000) + tensors["d2t"])


@pytest.mark.parametrize(("layout", "config"), [("A", LLAMA3), ("B", GEMMA4), ("C", GPT_OSS)])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_layouts_are_recognised_and_read_alike(layout, config, kind, tmp_path):
    made = cut(config, [0, 1, 2])
    tensors = {name: x.half() if x.is_floating_point() else x for name, x in head_tensors(made, layout).items()}
    folder = write_head(tmp_path, made, tensors, kind)
    assert published.recognise(folder) == "eagle3"
    drafter = make_drafter(str(folder))
    assert isinstance(drafter, Eagle3)
    assert drafter.network.config == convert(made, tensors)[0]
    prefix = "midlayer" if layout == "A" else "layers.0"
    qkv = [tensors[f"{prefix}.self_attn.{one}_proj.weight"] for one in "qkv"]
    assert torch.equal(drafter.network.layers[0].qkv.weight, torch.cat(qkv))
    assert drafter.network.fc.weight.dtype == torch.float16
    with pytest.raises(UserError, match="expected an MSD or EAGLE-1/2 drafter, received an EAGLE-3 head: use eagle3:"):
        make_drafter(f"msd:{folder}")


def test_switches_and_layers_come_from_the_configuration():
    def read(config):
        return convert(config, head_tensors(config, "B"))[0]

    plain = read(cut(LLAMA3))
    assert (plain.reads, plain.states, plain.rope["rope_theta"], plain.norm_eps) == ([], 3, 10000.0, 1e-5)
    assert not any(
        getattr(plain, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    )
    gemma = read(cut(GEMMA4))
    assert (gemma.reads, gemma.norm_before_residual, gemma.head_dim) == ([2, 30, 57], True, 16)
    assert read(cut(GPT_OSS)).reads == [2, 12, 22]  # given as layers whose outputs are read
    assert read({**cut(LLAMA3), "aux_hidden_states_layer_ids": [1, 11, 21]}).reads == [2, 12, 22]
    assert read({**cut(LLAMA3), "eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}).reads == []
    nested = {**cut(LLAMA3), "norm_before_fc": True}
    assert read(nested).norm_before_fc
    del nested["norm_before_fc"]
    nested["eagle_config"] = {"norm_before_fc": True}
    tensors = head_tensors({**nested, "norm_before_fc": True}, "C")
    assert convert(nested, tensors)[0].norm_before_fc
    sections = read(cut(QWEN3_VL)).rope
    assert (sections["mrope_section"], sections["mrope_interleaved"], sections["rope_theta"]) == ([4, 2, 2], True, 5e6)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("layout", "config"), [("A", LLAMA3), ("B", GEMMA4), ("C", GPT_OSS)])
def test_every_missing_and_every_further_tensor_is_named(layout, config):
    made = cut(config, [0, 1, 2], fc_norm=True)
    tensors = head_tensors(made, layout)
    optional = {"t2d", "lm_head.weight"}  # without an output layer, the target's is used
    for name in tensors.keys() - optional:
        rest = {other: value for other, value in tensors.items() if other != name}
        with pytest.raises(UserError, match=rf"here: expected exactly .*missing {name}") as caught:
            convert(made, rest)
        assert "\n" not in str(caught.value)
    for name in ("layers.1.mlp.up_proj.weight", "fc.bias", "input_norm.weight", "verifier_lm_head.weight"):
        with pytest.raises(UserError, match=f"received unknown {name}"):
            convert(made, tensors | {name: torch.zeros(1)})
    harmless = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert convert(made, tensors | harmless)[1].keys() == convert(made, tensors)[1].keys()


@pytest.mark.parametrize("name", sorted(head_tensors(cut(LLAMA3), "A", embedding=True)))
def test_wrong_shapes_are_named_with_both(name):
    tensors = head_tensors(cut(LLAMA3), "A", embedding=True)
    right = tuple(tensors[name].shape)
    wrong = (*right[:-1], right[-1] + 1)
    tensors[name] = torch.zeros(wrong, dtype=tensors[name].dtype)
    with pytest.raises(UserError) as caught:
        convert(cut(LLAMA3), tensors)
    assert str(caught.value) == f"here: {name} must be {right} by config.json: got {wrong}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": torch.full((DRAFT,), 80)}, r"i \+ d2t\[i\] must be distinct tokens below 101"),
        ({"d2t": torch.zeros(DRAFT).long() - 1}, r"distinct tokens below 101"),
        ({"d2t": torch.arange(DRAFT) * -1}, r"distinct tokens below 101"),
        ({"t2d": torch.ones(101).bool()}, r"t2d must mark exactly the tokens i \+ d2t\[i\]: it marks 101"),
        ({"t2d": (torch.arange(101) >= 101 - DRAFT)}, "t2d must mark exactly .*: it marks 40"),
        ({"d2t": torch.zeros(DRAFT)}, "d2t must be an integer or boolean tensor: got torch.float32"),
        ({"fc.weight": torch.zeros(48, 144).char()}, "fc.weight must be a floating point tensor: got torch.int8"),
    ],
)
def test_vocabularies_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        convert(cut(LLAMA3), head_tensors(cut(LLAMA3)) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a whole number >= 1: got None"),
        ({"vocab_size": None}, "vocab_size must be a whole number >= 1: got None"),
        ({"draft_vocab_size": 41}, r"d2t must be \(41,\) by config.json: got \(40,\)"),
        ({"num_key_value_heads": 3}, "kv_heads must divide heads"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu': got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be unset or false: got True"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rotary positions must be default, .*'dynamic'",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "turn whole heads: got a partial_rotary_factor of 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rotary positions must be valid: got .*"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}, "three sections of 8 frequencies in all"),
        ({"fc_norm": True, "norm_before_fc": True}, "one of norm_before_fc and fc_norm must be false: got both true"),
        ({"eagle_aux_hidden_state_layer_ids": "1,2"}, "must be a list of layers: got '1,2'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, -3]}, r"reads must name 3 layers, from 0 on: got \[1, 2, -3\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight must be \(48, 96\) by config.json: got \(48, 144\)"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        convert({**cut(LLAMA3), **changes}, head_tensors(cut(LLAMA3)))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- targets


def attach(config, tmp_path, name="llama", layout="A", **options):
    model = shared_model(name)
    drafter = make_drafter(str(write_head(tmp_path, config, head_tensors(config, layout, **options))))
    drafter.attach(plugins.target_class(model.config)(model))
    return drafter


def test_a_head_of_another_target_is_refused_by_name(tmp_path):
    with pytest.raises(
        UserError, match=r"trained for a target of .* of type qwen3: got LlamaForCausalLM .* of type llama$"
    ):
        attach(cut(QWEN3), tmp_path / "a")
    attach(cut(QWEN3), tmp_path / "a", "qwen3")
    named = cut(GEMMA4, [0, 1, 2])
    named["speculators_config"]["verifier"]["architectures"] = ["Gemma4ForConditionalGeneration"]
    message = "trained for google/gemma-4-31B-it of .* of class Gemma4ForConditionalGeneration: got LlamaForCausalLM"
    with pytest.raises(UserError, match=message):
        attach(named, tmp_path / "b", layout="B")
    with pytest.raises(
        UserError, match="hidden size 48 and 260 tokens: got LlamaForCausalLM with hidden size 48 and 101"
    ):
        attach(cut(LLAMA3, vocab_size=260), tmp_path / "c")
    with pytest.raises(UserError, match="hidden size 64 and 101 tokens: got LlamaForCausalLM with hidden size 48"):
        attach(cut(LLAMA3, hidden_size=64), tmp_path / "d")


def test_a_head_may_be_narrower_than_its_target(tmp_path):
    config = cut(LLAMA3, hidden_size=32, target_hidden_size=48)
    attach(config, tmp_path / "a", embedding=True)
    with pytest.raises(UserError, match="hidden size 48: the drafter reads states of 48 and embeddings of 32"):
        attach(config, tmp_path / "b")


def test_a_head_may_use_the_targets_output_layer(tmp_path):
    model, config = shared_model("llama"), cut(LLAMA3)
    tensors = head_tensors(config)
    with_own = checkpoint.load_network(Eagle3Network, *convert(config, tensors)[:2], tmp_path)
    ids = torch.arange(DRAFT) + tensors["d2t"]
    weight = model.get_output_embeddings().weight.detach()
    own = {**tensors, "lm_head.weight": weight[ids].clone()}
    del tensors["lm_head.weight"]
    scores = []
    state = torch.randn(1, 2, 48)
    for number, some in enumerate((own, tensors)):
        drafter = make_drafter(str(write_head(tmp_path / str(number), config, some)))
        drafter.attach(plugins.target_class(model.config)(model))
        scores.append(drafter._scores(state))
    torch.testing.assert_close(*scores)
    assert scores[0].shape == (1, 2, DRAFT)
    assert with_own.config.head == DRAFT


@pytest.mark.parametrize("own", [True, False])
def test_a_head_for_fewer_tokens_never_drafts_the_others(own, tmp_path):
    """As those for LLaVA-1.5's 32,000 tokens, of which transformers' has 64 more."""
    config = cut(LLAMA3, vocab_size=60, draft_vocab_size=60)
    tensors = head_tensors(config, "C")
    if not own:
        del tensors["lm_head.weight"]
    model = shared_model("llama")
    target = plugins.target_class(model.config)(model)
    drafter = make_drafter(str(write_head(tmp_path / "a", config, tensors)))
    drafter.attach(target)
    assert torch.equal(drafter.draft_ids, torch.arange(60))
    assert drafter._scores(torch.randn(1, 48)).shape == (1, 60)
    drafter.save(tmp_path / "b", target)
    assert torch.equal(make_drafter(str(tmp_path / "b")).draft_ids, torch.arange(60))


def test_a_whole_draft_vocabulary_needs_no_numbers(tmp_path):
    config = cut(LLAMA3, draft_vocab_size=101)
    tensors = head_tensors(config, "C")
    assert "d2t" not in tensors
    assert convert(config, tensors)[2] is None
    assert convert(config, tensors | {"d2t": torch.zeros(101).long(), "t2d": torch.ones(101).bool()})[2] is None
    assert torch.equal(convert(config, tensors | {"d2t": 100 - 2 * torch.arange(101)})[2], torch.arange(100, -1, -1))
