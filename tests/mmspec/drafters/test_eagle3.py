"""EAGLE-3, EAGLE-4 and P-EAGLE: trees on every kind of target against the network without a cache; checkpoints."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mmspec import SamplingParams, UserError
from mmspec.core.plan import StepPlan
from mmspec.core.target import output_of
from mmspec.drafters.checkpoint import load_network
from mmspec.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Network
from mmspec.drafters.layer import rotary_of
from mmspec.drafters.registry import make_drafter
from mmspec.ops import kernels
from mmspec.targets.packing import pack_drafter
from tests.eagle3 import (
    DRAFT,
    EAGLE4,
    GEMMA4,
    GPT_OSS,
    LLAMA3,
    PEAGLE,
    PEAGLE_FLAT,
    QWEN2_5_VL,
    QWEN3,
    QWEN3_VL,
    VOCAB,
    check_head,
    cut,
    head_tensors,
    states_read,
)
from tests.mmspec.drafters.test_drafters import target_of
from tests.published import write
from tests.targets import prefilled, prompt_of, row_of
from tests.tiny import shared_model
from tests.tiny.models import eagle3_network, text_inputs, vision_inputs

NEW = {"norm_before_residual": False, "fc_norm": True, "norm_output": True}  # EAGLE-3.1
SPECULATORS = {"norm_before_fc": True, "norm_output": True, "num_hidden_layers": 2}
FOUR = cut(EAGLE4, [0, 1, 2], sliding_window=5, num_candidates=9, draft_vocab_size=VOCAB)


def convert(config, tensors):
    return Eagle3.convert(config, tensors, "here")


def sliding(config):
    layer = config["transformer_layer_config"] | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    return {**config, "transformer_layer_config": layer}


CASES = {
    "A": (cut(LLAMA3), "A", [0, 1, 2]),
    "A-embedding": (cut(LLAMA3), "A", [0, 1, 2]),
    "A-3.1": (cut(LLAMA3, [2, 0, 1, 1], **NEW), "A", [2, 0, 1, 1]),
    "A-parallel": (cut(PEAGLE_FLAT), "A", [0, 1, 2]),
    "B": (cut(GEMMA4, [0, 1, 2]), "B", [0, 1, 2]),
    "B-two-layers": (cut(GEMMA4, [0, 1], **SPECULATORS), "B", [0, 1]),
    "B-window": (sliding(cut(GEMMA4, [0, 1, 2], num_hidden_layers=2)), "B", [0, 1, 2]),
    "B-parallel": (cut(PEAGLE, [0, 1], fc_norm=True, norm_output=True, num_hidden_layers=2), "B", [0, 1]),
    "B-parallel-window": (sliding(cut(PEAGLE, [0, 1])), "B", [0, 1]),
    "C": (cut(GPT_OSS, [1, 2, 1]), "C", [1, 2, 1]),
    "EAGLE-4": (FOUR, "C", [0, 1, 2]),
}
STATIC = ["A-parallel", "B-window", "B-parallel-window", "EAGLE-4"]


def head(tmp_path, config, layout="A", embedding=False, kind="safetensors", at=""):
    """A loaded drafter, and the tensors of its checkpoint."""
    tensors = head_tensors(config, layout, embedding=embedding)
    folder = write(tmp_path, config, tensors, kind)
    drafter = make_drafter(f"eagle3:{folder}{at}" if at else str(folder))
    assert isinstance(drafter, Eagle3)
    drafter.top_k = 3
    return drafter, tensors


# ---------------------------------------------------------------------- what is drafted


@pytest.mark.parametrize(("name", "static"), [(name, static) for name in CASES for static in {False, name in STATIC}])
def test_nodes_have_the_probabilities_of_the_network_without_a_cache(name, static, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    config, layout, reads = CASES[name]
    drafter, tensors = head(
        tmp_path, config, layout, name == "A-embedding", "bin" if name == "A-3.1" else "safetensors"
    )
    assert drafter.network.config.mask_token_id == {"A-parallel": 98}.get(name, 99 if "parallel" in name else None)
    check_head(shared_model("llama"), text_inputs(3), drafter, config, tensors, reads, skip=(1, 4), new=8)


@pytest.mark.parametrize("name", ["mistral-window", "qwen3_5_text", "falcon_mamba"])
def test_text_and_hybrids_while_sampling(name, tmp_path):
    config, model, params = cut(LLAMA3), shared_model(name), SamplingParams(temperature=1.0)
    drafter, tensors = head(tmp_path, config)
    reads = drafter.network.config.inputs_read(model.config.get_text_config().num_hidden_layers)
    check_head(model, text_inputs(3), drafter, config, tensors, reads, new=8, params=params)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("llava", "EAGLE-4"),
        ("llava_next", "B-parallel"),
        ("qwen3_vl", cut(QWEN3_VL, [1, 2, 0])),
        ("qwen2_5_vl", cut(QWEN2_5_VL, [1, 2, 0])),
        ("qwen2_vl", cut(LLAMA3, [1, 2, 0])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images(name, case, tmp_path):
    """They are placeholder tokens, at the target's positions where the head has sections for their axes."""
    config, layout, reads = CASES[case] if isinstance(case, str) else (case, "A", [1, 2, 0])
    drafter, tensors = head(tmp_path, config, layout)
    check_head(shared_model(name), vision_inputs(name, 2), drafter, config, tensors, reads, new=7)


@pytest.mark.parametrize("given", [{"num_candidates": 30}, {"candidate_head": {"num_candidates": 30}}, {}])
def test_candidates_are_the_configurations(given):
    config = {name: value for name, value in FOUR.items() if name != "num_candidates"}
    network = Eagle3.convert({**config, **given}, head_tensors(config, "C"), "here")[0]
    expected = (30 if given else VOCAB, 20, 5, [0, 1, 2])  # without a number, 256 at most
    assert (network.candidates, network.head_rank, network.window, network.reads) == expected
    narrow = {**config, **given, "draft_vocab_size": 20}
    assert Eagle3.convert(narrow, head_tensors(narrow, "C"), "here")[0].candidates == 20


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


def test_a_mask_must_be_a_token_and_is_of_one_pass_only(tmp_path):
    drafter, _ = head(tmp_path / "a", {**CASES["B-parallel"][0], "mask_token_id": 101}, "B")
    config = cut(PEAGLE_FLAT)
    with pytest.raises(UserError, match="mask_token_id must be a token below 101: got 101"):
        drafter.attach(target_of("llama"))
    tensors = head_tensors(config)
    del tensors["mask_hidden"]
    assert make_drafter(str(write(tmp_path / "b", config, tensors))).network.config.mask_token_id is None


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
    check_head(model, text_inputs(2), drafter, config, tensors, [2, 0, 1], new=6)
    assert drafter.features == (output_of(1), 0, 1)
    assert drafter.checks == (
        "the target that it was trained for, the number of training steps (too few?), chat template, rotary positions, "
        "positions after images, and the layers output 1, 0, 1 that it reads: try eagle3:FOLDER@LAYERS"
    )
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
    target = target_of(model)
    reads = (output_of(0), 1, output_of(1), 0, "last")
    output = prefilled(target, prompt_of(inputs), 4, reads)
    before, after = output.features[output_of(0)], output.features[1]
    at = output.visual[0]
    assert torch.equal(before[0, ~at], after[0, ~at])
    assert not torch.isclose(before[0, at], after[0, at]).all(-1).any()
    read, _ = states_read(model, row_of(inputs, 0), [], [0, 1], outputs=True)
    for layer in (0, 1):
        torch.testing.assert_close(output.features[output_of(layer)][0], read[layer], atol=1e-5, rtol=1e-5)


def test_layers_that_the_target_lacks_are_named(tmp_path):
    target = target_of("llama")
    drafter, _ = head(tmp_path, cut(GPT_OSS, [2, 12, 22]), "C")
    with pytest.raises(UserError, match="reads inputs of layers 2, 12, 22: the target has 2 layers"):
        drafter.attach(target)
    drafter, _ = head(tmp_path, cut(GPT_OSS), "C", at="@outputs:0,1,2")
    with pytest.raises(UserError, match="reads outputs of layers 0, 1, 2: the target has 2 layers"):
        drafter.attach(target)


def test_placeholders_outside_of_the_table_are_fed_as_token_0(tmp_path):
    """Of a target whose placeholder has an id above those of the head's own embedding."""
    drafter, _ = head(tmp_path, cut(LLAMA3), embedding=True)
    target = target_of("llava")
    drafter.attach(target)
    states = torch.randn(1, 4, 3 * 48, generator=torch.Generator().manual_seed(0))
    beyond, zero = torch.tensor([[5, VOCAB, VOCAB + 9, VOCAB - 1]]), torch.tensor([[5, 0, 0, VOCAB - 1]])
    with torch.inference_mode():
        assert torch.equal(drafter.inputs(beyond, states), drafter.inputs(zero, states))


def test_rows_that_join_leave_the_positions_of_others_in_the_table(monkeypatch):
    """A video's positions exceed its tokens by far; those of a text that joins do not."""
    monkeypatch.setattr("mmspec.drafters.hidden_state.AHEAD", 1)
    model = shared_model("qwen3_vl")
    target = target_of(model)
    drafter = Eagle3(eagle3_network(model), torch.arange(40), top_k=3, depth=3, total_tokens=9)
    drafter.attach(target)
    reads = drafter.features
    ample = StepPlan(9, 3)
    token = torch.tensor([5, 6])
    for number, last in ((0, 1022), (1, 11)):
        prompt = prompt_of(text_inputs(1, 12, number))
        output = prefilled(target, prompt, 64, reads)
        output.positions = torch.arange(12).expand(3, 1, 12).clone()
        output.positions[..., 6:] += last - 11
        drafter.begin(prompt, output, [[*prompt.input_ids[0].tolist(), int(token[number])]])
    assert drafter.propose(token, ample).nodes == 10


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


def test_the_targets_window_in_a_flat_configuration_is_not_read():
    config = {**cut(LLAMA3), "layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    assert convert(config, head_tensors(config))[0].window == 0


# ---------------------------------------------------------------------- targets


def attach(config, tmp_path, name="llama", layout="A", **options):
    drafter = make_drafter(str(write(tmp_path, config, head_tensors(config, layout, **options))))
    drafter.attach(target_of(name))
    return drafter


def test_a_head_of_another_target_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"for another target \(model_type qwen3\): got .*model_type \['llama'\]$"):
        attach(cut(QWEN3), tmp_path / "a")
    attach(cut(QWEN3), tmp_path / "a", "qwen3")
    named = cut(GEMMA4, [0, 1, 2])
    named["speculators_config"]["verifier"]["architectures"] = ["Gemma4ForConditionalGeneration"]
    message = r"google/gemma-4-31B-it \(architectures .*Gemma4ForConditional.*\): got .*\['LlamaForCausalLM'\]"
    with pytest.raises(UserError, match=message):
        attach(named, tmp_path / "b", layout="B")


def test_a_head_may_be_narrower_than_its_target(tmp_path):
    config = cut(LLAMA3, hidden_size=32, target_hidden_size=48)
    attach(config, tmp_path / "a", embedding=True)
    with pytest.raises(UserError, match="hidden size 48: the drafter reads states of 48 and embeddings of 32"):
        attach(config, tmp_path / "b")


def test_a_head_may_use_the_targets_output_layer(tmp_path):
    model, config = shared_model("llama"), cut(LLAMA3)
    tensors = head_tensors(config)
    with_own = load_network(Eagle3Network, *convert(config, tensors)[:2], tmp_path)
    ids = torch.arange(DRAFT) + tensors["d2t"]
    weight = model.get_output_embeddings().weight.detach()
    own = {**tensors, "lm_head.weight": weight[ids].clone()}
    del tensors["lm_head.weight"]
    scores = []
    state = torch.randn(1, 2, 48)
    for number, some in enumerate((own, tensors)):
        drafter = make_drafter(str(write(tmp_path / str(number), config, some)))
        drafter.attach(target_of(model))
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
    target = target_of("llama")
    drafter = make_drafter(str(write(tmp_path / "a", config, tensors)))
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
