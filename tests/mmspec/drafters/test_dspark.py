"""DSpark's Markov and confidence heads, JetSpec's causal blocks: every node against a loop over published tensors."""

from __future__ import annotations

import copy

import pytest
import torch

import mmspec
from mmspec import SamplingParams, UserError, plugins
from mmspec.core.budget import Budget
from mmspec.drafters.dflash import DFlash, DFlashNetwork
from mmspec.drafters.growth import grow_levels
from mmspec.drafters.registry import make_drafter
from mmspec.ops import kernels
from mmspec.targets.packing import pack_model
from tests.compiled import needs_kernels
from tests.dflash import BLOCK, WIDTH, check_blocks, published, reference, with_heads, write
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import dflash_network, text_inputs, vision_inputs


def _network(model, kind):
    heads = {"markov_rank": 32, "markov_inputs": VOCAB, "markov_outputs": VOCAB, "markov_type": kind}
    return dflash_network(model, window=0, sliding=[], from_anchor=True, **heads)


LAYOUTS = ["z-lab", "speculators"]


def drafter_of(tmp_path, config, tensors):
    drafter = make_drafter(str(write(tmp_path, config, tensors)))
    assert isinstance(drafter, DFlash)
    drafter.top_k = 3
    return drafter


# ---------------------------------------------------------------------- what is drafted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rank", "confidence"), [(6, "markov"), (6, "state"), (6, "none"), (0, "state")])
def test_nodes_have_the_probabilities_of_a_loop(layout, rank, confidence, tmp_path):
    plain = reference()
    config, tensors = with_heads(*published(plain, layout), rank, confidence)
    drafter = drafter_of(tmp_path, config, tensors)
    assert (drafter.network.config.markov_rank, drafter.network.config.confidence) == (rank, confidence)
    check_blocks(shared_model("llama"), text_inputs(3), drafter, plain, tensors=tensors, skip=(1, 4), depth=BLOCK)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("kind", "from_anchor"), [("gated", True), ("rnn", True), ("rnn", False)])
def test_gated_and_recurrent_heads(kind, from_anchor, static, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    plain = reference()
    config, tensors = with_heads(*published(plain, LAYOUTS[from_anchor]), kind=kind, from_anchor=from_anchor)
    drafter = drafter_of(tmp_path, config, tensors)
    assert (drafter.network.config.markov_type, drafter.network.config.from_anchor) == (kind, from_anchor)
    check_blocks(shared_model("llama"), text_inputs(3), drafter, plain, tensors=tensors, skip=(1, 4), depth=BLOCK)


def test_nodes_while_sampling(tmp_path):
    plain, params = reference(), SamplingParams(temperature=1.0)
    config, tensors = with_heads(*published(plain, "speculators"), kind="rnn")
    drafter = drafter_of(tmp_path, config, tensors)
    check_blocks(shared_model("llama"), text_inputs(3), drafter, plain, tensors=tensors, params=params)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_5_text"])
def test_nodes_after_images_and_of_hybrids(name, tmp_path):
    plain = reference(target_layer_ids=[0])
    inputs = text_inputs(3) if name == "qwen3_5_text" else vision_inputs(name, 2)
    config, tensors = with_heads(*published(plain, "z-lab"))
    drafter = drafter_of(tmp_path, config, tensors)
    check_blocks(shared_model(name), inputs, drafter, plain, tensors=tensors, new=8)


def test_nodes_with_static_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    plain = reference()
    config, tensors = with_heads(*published(plain, "speculators"))
    drafter = drafter_of(tmp_path, config, tensors)
    check_blocks(shared_model("llama"), text_inputs(3), drafter, plain, tensors=tensors)


def test_a_draft_vocabulary(tmp_path):
    plain, ids = reference(), torch.arange(4, 80, 2)
    config, tensors = with_heads(*published(plain, "speculators", draft_vocab_size=len(ids)), outputs=len(ids))
    head = torch.nn.Linear(WIDTH, len(ids), bias=False)
    tensors["lm_head.weight"], tensors["d2t"] = head.weight.detach(), ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    drafter = drafter_of(tmp_path, config, tensors)
    check_blocks(shared_model("llama"), text_inputs(2), drafter, plain, tensors=tensors, ids=ids.tolist(), head=head)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["causal_head", "causal", "is_causal"])
def test_causal_blocks(name, static, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    plain = reference()
    config, tensors = published(plain, "z-lab")
    (config if name == "is_causal" else config["dflash_config"])[name] = True
    drafter = drafter_of(tmp_path, config, tensors)
    assert drafter.network.config.causal == [0, 1]
    check_blocks(shared_model("llama"), text_inputs(3), drafter, plain, causal=True)


def test_layers_with_a_window_are_causal_alone(tmp_path):
    config, tensors = published(reference(), "speculators", sliding_window_non_causal=False)
    assert drafter_of(tmp_path, config, tensors).network.config.causal == [1]
    assert drafter_of(tmp_path, {**config, "causal": False}, tensors).network.config.causal == []


@pytest.mark.parametrize("nodes", [1, 2, 9, 40])
def test_levels_give_the_most_probable_paths(nodes):
    """Where the beam is as wide as a level, of all paths; with static shapes the same."""
    g = torch.Generator().manual_seed(nodes)
    shares = torch.randn(4, 6, 6, generator=g).log_softmax(-1)  # level, parent, child

    def children(level, parents, above):
        log_probs, tokens = shares[level][parents].sort(-1, descending=True)
        return tokens, log_probs

    def every(last, level, gain):
        for child in range(6) if level < 4 else ():
            yield gain + float(shares[level, last, child])
            yield from every(child, level + 1, gain + float(shares[level, last, child]))

    tree = grow_levels(torch.tensor([2, 5]), children, Budget(nodes, 4), 6**3, depth=4, nodes=64)
    for row, root in enumerate((2, 5)):
        best = sorted(every(root, 0, 0.0), reverse=True)[:nodes]
        assert tree.log_probs[row, 1:].tolist() == pytest.approx(best, abs=1e-4)


@needs_kernels
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_trees_beside_quantised_weights(kind):
    """A vanilla head's tree is a call of the kernels, equal to the one that the others have from torch."""
    model = copy.deepcopy(shared_model("llama"))
    pack_model(model, "int8")
    inputs, options = text_inputs(3), {"max_new_tokens": 12, "eos_token_id": None}
    plain = mmspec.generate(model, drafter=None, **options, **inputs)
    drafter = DFlash(_network(model, kind), top_k=3, total_tokens=12)
    trees = []

    def propose(token, budget):
        trees.append([grow(token, budget)])
        native, drafter._markov = drafter._markov, None
        trees[-1].append(grow(token, budget))
        drafter._markov = native
        return trees[-1][0]

    grow, drafter.grow = drafter.grow, propose
    found = mmspec.generate(model, drafter=drafter, nodes=12, **options, **inputs)
    assert (drafter._markov is not None) == (kind == "vanilla")
    assert torch.equal(found, plain)
    assert len(trees) > 2
    for ours, theirs in trees:
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.parents, theirs.parents)
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------- checkpoints


def test_defaults_of_speculators_and_of_flat_configurations(tmp_path):
    config, tensors = with_heads(*published(reference(), "speculators"), rank=256)
    for name in ("sample_from_anchor", "markov_rank", "enable_confidence_head", "confidence_head_with_markov"):
        del config[name]
    network = drafter_of(tmp_path / "a", config, tensors).network.config
    assert (network.from_anchor, network.markov_rank, network.confidence) == (True, 256, "markov")
    config, tensors = with_heads(*published(reference(), "z-lab"))
    own = config.pop("dflash_config")  # deepseek-ai/DeepSpec
    config = {**config, **own, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    del config["sample_from_anchor"]
    network = drafter_of(tmp_path / "b", config, tensors).network.config
    assert (network.from_anchor, network.markov_rank, network.confidence) == (True, 6, "markov")


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_every_tensor_missing_further_or_misshapen_is_named(kind, tmp_path):
    config, tensors = with_heads(*published(reference(), "speculators"), kind=kind)
    for name in (name for name in tensors if "_head" in name):
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        for changed, said in (
            (rest, f"missing {name}"),
            (tensors | {f"{name}.more": tensors[name].clone()}, f"unknown {name}.more"),
            (tensors | {name: torch.cat([tensors[name]] * 2)}, f"{name} must be "),
        ):
            with pytest.raises(UserError, match=said) as caught:
                drafter_of(tmp_path, config, changed)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("markov_head_type", "lstm", "markov_head_type must be 'vanilla' or 'gated' or 'rnn': got 'lstm'"),
        ("markov_head_type", "gated", "missing markov_head.gate_proj.bias, markov_head.gate_proj.weight"),
        ("markov_head_type", "rnn", "missing markov_head.joint_proj.bias, markov_head.joint_proj.weight"),
        ("markov_rank", -1, "markov_rank must be a whole number >= 0: got -1"),
        ("markov_rank", 0, "markov_rank must be positive for a confidence head that reads the Markov head: got 0"),
        ("markov_rank", 7, r"confidence_head.proj.weight must be \(1, 55\) by config.json: got \(1, 54\)"),
        ("sample_from_anchor", "yes", "sample_from_anchor must be True or False: got 'yes'"),
        ("enable_confidence_head", False, "unknown confidence_head.proj.bias, confidence_head.proj.weight"),
        ("confidence_head_with_markov", False, r"proj.weight must be \(1, 48\) by config.json: got \(1, 54\)"),
    ],
)
def test_configurations_that_cannot_be_are_refused_by_name(layout, field, value, said, tmp_path):
    config, tensors = with_heads(*published(reference(), layout))
    with pytest.raises(UserError, match=said) as caught:
        drafter_of(tmp_path, {**config, field: value}, tensors)
    assert "\n" not in str(caught.value)


def test_a_type_without_a_markov_head_is_refused():
    with pytest.raises(UserError, match="markov_rank must be positive for a gated Markov head: got 0"):
        dflash_network(shared_model("llama"), markov_type="gated")


def test_a_markov_head_of_other_draft_tokens_than_the_output_layers_is_refused(tmp_path):
    config, tensors = with_heads(*published(reference(), "z-lab"))
    drafter, model = drafter_of(tmp_path, config, tensors), shared_model("llama")
    drafter.draft_ids = torch.arange(50)
    with pytest.raises(UserError, match="markov_outputs must be the 50 draft tokens: got 101"):
        drafter.attach(plugins.target_class(model.config)(model))


QWEN3_8B = {  # of sgl-project/SpecForge
    "architectures": ["DSparkDraftModel"],
    "attention_bias": False,
    "block_size": 7,
    "dflash_config": {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "mask_token_id": 151669,
        "projector_type": "dspark",
        "target_layer_ids": [1, 9, 17, 25, 33],
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_published_configuration_at_full_size():
    shapes = {"fc.weight": (4096, 5 * 4096), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}
    for layer in (f"layers.{number}" for number in range(5)):
        rows = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (128,) for name in "qk"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (12288, 4096) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (4096, 12288)
        shapes |= {f"{layer}.{name}_layernorm.weight": (4096,) for name in ("input", "post_attention")}
    shapes |= {f"markov_head.markov_{name}.weight": (151936, 256) for name in ("w1", "w2")}
    shapes |= {"confidence_head.proj.weight": (1, 4096 + 256), "confidence_head.proj.bias": (1,)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    network, ours, draft_ids, _ = DFlash.convert(QWEN3_8B, tensors, "here")
    with torch.device("meta"):
        expected = {name: value.shape for name, value in DFlashNetwork(network).state_dict().items()}
    assert {name: value.shape for name, value in ours.items()} == expected
    assert draft_ids is None
    assert (network.drafts, network.confidence, network.rope["rope_theta"]) == (7, "markov", 1e6)
