"""DFlash, JetSpec and DSpark draft what transformers' implementation of the network does, on every kind of target."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.cohere import modeling_cohere
from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant

import mmspec
from mmspec import SamplingParams, UserError
from mmspec.core.plan import StepPlan
from mmspec.drafters.dflash import DFlash, default_layer_ids
from mmspec.drafters.growth import grow_slots
from mmspec.drafters.hidden_state import plain_embedding
from mmspec.drafters.registry import make_drafter
from mmspec.ops import kernels
from mmspec.targets.packing import pack_model
from tests.compiled import needs_kernels
from tests.dflash import BLOCK, CONFIGS, WIDTH, check_blocks, cut, published, reference, with_heads, write
from tests.mmspec.drafters.test_drafters import target_of
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.drafters import NETWORKS
from tests.tiny.models import dflash_network, text_inputs, vision_inputs

LAYOUTS = ["z-lab", "transformers", "speculators"]


def loaded(tmp_path, config, tensors):
    """A drafter read from a folder; trees of three children per node."""
    drafter = make_drafter(str(write(tmp_path, config, tensors)))
    assert isinstance(drafter, DFlash)
    drafter.top_k = 3
    return drafter


def drafter_of(tmp_path, plain, layout="z-lab", **changes):
    return loaded(tmp_path, *published(plain, layout, **changes))


def _network(model, kind, **heads):
    heads |= {"markov_rank": 32, "markov_inputs": VOCAB, "markov_outputs": VOCAB, "markov_type": kind}
    return dflash_network(model, window=0, sliding=[], from_anchor=True, **heads)


HEADS = [
    ("z-lab", {}),
    ("z-lab", {"rank": 6, "confidence": "markov"}),
    ("z-lab", {"rank": 0, "confidence": "state"}),
    ("speculators", {"rank": 6, "confidence": "state"}),
    ("speculators", {"rank": 6, "confidence": "none"}),
    ("speculators", {"kind": "gated"}),
    ("speculators", {"kind": "rnn"}),
    ("z-lab", {"kind": "rnn", "from_anchor": False}),
]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("layout", "heads"), HEADS, ids=str)
def test_nodes_have_the_probabilities_of_the_reference(layout, heads, static, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    plain = reference()
    config, tensors = published(plain, layout)
    if heads:
        config, tensors = with_heads(config, tensors, **heads)
    drafter = loaded(tmp_path, config, tensors)
    network, kind = drafter.network.config, {"rank": 6, "confidence": "markov", "kind": "vanilla", "from_anchor": True}
    expected = tuple({**kind, **heads}.values()) if heads else (0, "none", "vanilla", False)
    assert (network.markov_rank, network.confidence, network.markov_type, network.from_anchor) == expected
    asked = {"tensors": tensors, "skip": (1, 4), "depth": BLOCK}
    check_blocks(shared_model("llama"), text_inputs(3), drafter, plain, **asked)


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "qwen3_vl", "qwen3_5_text", "bamba"])
def test_nodes_after_images_and_of_hybrids_while_sampling(name, tmp_path):
    """Of a target with several position axes, the largest is a token's position."""
    plain = reference(target_layer_ids=[0])
    inputs = text_inputs(3) if name in ("qwen3_5_text", "bamba") else vision_inputs(name, 2)
    config, tensors = with_heads(*published(plain, "z-lab"), kind="rnn")
    drafter, params = loaded(tmp_path, config, tensors), SamplingParams(temperature=1.0)
    check_blocks(shared_model(name), inputs, drafter, plain, tensors=tensors, new=8, params=params)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("LiquidAI/LFM2.5-2.6B-DSpark", "lfm2"),
        ("RadixArk/Qwen3.8-27B-DSpark", "qwen3_5"),
        ("openbmb/MiniCPM5-2B-DSpark", "llama"),
        ("SpecForge/Qwen3-8B-dspark", "llama"),
    ],
)
def test_published_configurations_of_dspark(name, target, tmp_path, monkeypatch):
    """The reference rotates neighbours together, as GPT-J does, where the configuration says so."""
    config = cut(CONFIGS[f"dflash {name}"])
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 1e4)}
    kinds = {"layer_types": ["full_attention"] * 2, "rms_norm_eps": config["rms_norm_eps"]}
    plain = reference(rope_parameters=rope, **kinds)
    tensors = with_heads(*published(plain, "z-lab"))[1]
    if config.get("rope_is_neox_style") is False:
        rotate = modeling_muse_glimmer_assistant.apply_rotary_pos_emb

        def together(q, k, *waves):
            return rotate(q, k, *(one[..., : one.shape[-1] // 2].repeat_interleave(2, dim=-1) for one in waves))

        monkeypatch.setattr(modeling_muse_glimmer_assistant, "rotate_half", modeling_cohere.rotate_half)
        monkeypatch.setattr(modeling_muse_glimmer_assistant, "apply_rotary_pos_emb", together)
    drafter = loaded(tmp_path, config, tensors)
    assert (drafter.network.config.from_anchor, drafter.network.config.confidence) == (True, "markov")
    inputs = vision_inputs(target, 2) if target == "qwen3_5" else text_inputs(2)
    check_blocks(shared_model(target), inputs, drafter, plain, tensors=tensors, skip=(1,), depth=BLOCK)


def test_scaled_positions_and_layers_without_windows(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    plain = reference(rope_parameters=rope, layer_types=["full_attention"] * 2)
    check_blocks(shared_model("llama"), text_inputs(2), drafter_of(tmp_path, plain, "transformers"), plain)


@pytest.mark.parametrize("dspark", [False, True])
def test_a_draft_vocabulary_with_an_output_layer_of_its_own(dspark, tmp_path):
    plain, ids = reference(), torch.arange(4, 80, 2)
    config, tensors = published(plain, "speculators", draft_vocab_size=len(ids))
    if dspark:
        config, tensors = with_heads(config, tensors, outputs=len(ids))
    head = torch.nn.Linear(WIDTH, len(ids), bias=False)
    tensors["lm_head.weight"], tensors["d2t"] = head.weight.detach(), ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    drafter = loaded(tmp_path, config, tensors)
    assert torch.equal(drafter.draft_ids, ids)
    check_blocks(shared_model("llama"), text_inputs(2), drafter, plain, tensors=tensors, ids=ids.tolist(), head=head)


def test_an_embedding_of_its_own_may_have_fewer_tokens_than_the_target(tmp_path):
    config, tensors = published(reference(), "speculators")
    config["transformer_layer_config"]["vocab_size"] = 100
    tensors["embed_tokens.weight"] = torch.randn(100, WIDTH)
    drafter = make_drafter(str(write(tmp_path, config, tensors)))
    drafter.attach(target_of("llama"))
    assert torch.equal(drafter.draft_ids, torch.arange(100))
    expected = tensors["embed_tokens.weight"][[5, 99, 0]]
    assert torch.equal(drafter.embed(torch.tensor([5, 99, 100])), expected)


def test_a_table_that_norms_embeddings_is_read_without_the_norm():
    model = shared_model("llama")
    target, tokens = target_of(model), torch.tensor([5, 7])
    table = model.get_input_embeddings()
    expected = table(tokens)
    table.embed_norm = torch.nn.Identity()
    forward, table.forward = table.forward, lambda ids: 2 * forward(ids)
    try:
        assert torch.equal(plain_embedding(target, tokens), expected)
        assert torch.equal(target.embed(tokens), 2 * expected)
    finally:
        del table.embed_norm, table.forward


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("nodes", [1, 2, 9, 40])
def test_trees_are_the_most_probable_paths_on_the_host_and_with_static_shapes(spread, nodes, monkeypatch):
    g = torch.Generator().manual_seed(nodes)
    log_probs = (spread * torch.randn(2, 4, 5, generator=g)).log_softmax(-1).sort(descending=True).values
    tokens = torch.stack([torch.randperm(50, generator=g)[:5] for _ in range(8)]).view(2, 4, 5)
    roots, plan = torch.tensor([3, 4]), StepPlan(nodes, 4)
    host = grow_slots(roots, tokens, log_probs, plan, 64)
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    static = grow_slots(roots, tokens, log_probs, plan, 64)
    assert torch.equal(host.tokens, static.tokens)
    assert torch.equal(host.parents, static.parents)
    torch.testing.assert_close(host.log_probs, static.log_probs)
    for row in range(2):
        ranks = (path for depth in range(1, 5) for path in product(range(5), repeat=depth))
        every = [sum(float(log_probs[row, level, rank]) for level, rank in enumerate(path)) for path in ranks]
        assert host.log_probs[row, 1:].tolist() == pytest.approx(sorted(every, reverse=True)[:nodes], abs=1e-4)


@pytest.mark.parametrize(("name", "static"), [("causal_head", False), ("causal", True), ("is_causal", False)])
def test_causal_blocks(name, static, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "static_shapes", lambda device: static)
    plain = reference()
    config, tensors = published(plain, "z-lab")
    del config["is_causal"]
    (config if name == "is_causal" else config["dflash_config"])[name] = True
    drafter = loaded(tmp_path, config, tensors)
    assert drafter.network.config.causal == [0, 1]
    kinds = ("full_attention", "sliding_attention")
    check_blocks(shared_model("llama"), text_inputs(3), drafter, plain, causal=kinds)


@pytest.mark.parametrize(("layout", "name"), [("speculators", "sliding_window_non_causal"), ("z-lab", "is_causal")])
def test_layers_with_a_window_are_causal_unless_the_configuration_says_otherwise(layout, name, tmp_path):
    plain = reference()
    config, tensors = published(plain, layout)
    assert loaded(tmp_path / "a", config, tensors).network.config.causal == []
    del config[name]
    drafter = loaded(tmp_path / "b", config, tensors)
    assert drafter.network.config.causal == [1]
    check_blocks(shared_model("llama"), text_inputs(2), drafter, plain, causal=("sliding_attention",))


@needs_kernels
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize(
    ("kind", "confidence"), [("vanilla", "none"), ("vanilla", "state"), ("gated", "none"), ("rnn", "none")]
)
def test_trees_beside_quantised_weights(kind, confidence, chain):
    """A vanilla head's tree is a call of the kernels, equal to the one that the others have from torch."""
    model = copy.deepcopy(shared_model("llama"))
    pack_model(model, "int8")
    inputs, options = text_inputs(3), {"max_new_tokens": 12, "eos_token_id": None}
    plain = mmspec.generate(model, drafter=None, **options, **inputs)
    drafter = DFlash(_network(model, kind, confidence=confidence), top_k=3, total_tokens=12)
    trees = []

    def propose(token, plan):
        plan = replace(plan, chain=chain)
        trees.append([grow(token, plan)])
        native, drafter._markov = drafter._markov, None
        trees[-1].append(grow(token, plan))
        drafter._markov = native
        return trees[-1][0]

    grow, drafter.grow = drafter.grow, propose
    found = mmspec.generate(model, drafter=drafter, nodes=12, **options, **inputs)
    assert (drafter._markov is not None) == ((kind, confidence) == ("vanilla", "none"))
    assert torch.equal(found, plain)
    assert len(trees) > 2
    for ours, theirs in trees:
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.parents, theirs.parents)
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-3, rtol=1e-3)
        assert not chain or torch.equal(ours.parents, torch.arange(-1, ours.nodes - 1).expand(3, -1))
    assert max(ours.nodes for ours, _ in trees) > 2


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "xpress"])
def test_a_target_may_have_more_tokens_than_the_drafter(kind):
    """Its further tokens are never drafted, but others follow them."""
    drafter = DFlash(NETWORKS[kind](shared_model("llama")), top_k=3)
    drafter.verifier = {"vocab_size": VOCAB, "hidden_size": 48, "model_type": None}
    torch.manual_seed(0)
    config = copy.deepcopy(shared_model("llama").config)
    config.vocab_size = VOCAB + 27
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data[VOCAB:] *= 30
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **text_inputs(2)}
    plain = model.generate(**options)
    assert bool((plain[:, -12:-1] >= VOCAB).any())
    assert torch.equal(mmspec.generate(model, drafter=drafter, nodes=8, **options), plain)


def test_convolutions_stay_inside_blocks():
    network = dflash_network(shared_model("llama"), conv_kernel_size=3, conv_group_size=4)
    conv = network.layers[1].attention_conv
    x = torch.randn(2, 3 * conv.block, WIDTH, generator=torch.Generator().manual_seed(0))
    apart = torch.cat([conv(part, torch.tanh) for part in x.split(conv.block, dim=1)], dim=1)
    torch.testing.assert_close(conv(x, torch.tanh), apart)


@needs_kernels
@pytest.mark.parametrize("conv", [{}, {"conv_kernel_size": 2, "conv_group_size": 4}])
def test_the_kernels_take_blocks_without_convolutions(conv):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=VOCAB, pad_token_id=0)).eval()
    pack_model(model, "int8")
    selector = {"selector_rank": 6, "selector_tokens": VOCAB, "selector_top_k": 7}
    drafter = DFlash(dflash_network(model, window=0, sliding=[], **selector, **conv), top_k=3)
    inputs, options = text_inputs(2), {"max_new_tokens": 8, "eos_token_id": None}
    plain = mmspec.generate(model, drafter=None, **options, **inputs)
    assert torch.equal(mmspec.generate(model, drafter=drafter, nodes=12, **options, **inputs), plain)
    assert (drafter.native_layers is None) == bool(conv)


def test_default_layers_are_evenly_spaced():
    assert [default_layer_ids(layers) for layers in (36, 6, 3, 1)] == [[1, 9, 17, 25, 33], [1, 2, 3], [0, 1, 2], [0]]


def test_a_block_size_may_be_nested(tmp_path):
    config, tensors = published(reference(), "z-lab")
    config["dflash_config"]["block_size"] = config.pop("block_size")
    assert make_drafter(str(write(tmp_path, config, tensors))).network.config.block_size == BLOCK


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 140}, r"\(vocab_size 140\): got LlamaForCausalLM with vocab_size 101$"),
        ({"mask": VOCAB}, "mask_token_id must be a token below 101: got 101"),
        ({"layers": [0, 2]}, "reads outputs of layers 0, 2: the target has 2 layers"),
    ],
)
def test_targets_that_do_not_fit_are_refused(changes, said, tmp_path):
    changes = dict(changes)
    own = {"mask_token_id": changes.pop("mask", 99), "target_layer_ids": changes.pop("layers", [1, 0])}
    drafter = drafter_of(tmp_path, reference(), dflash_config=own, **changes)
    with pytest.raises(UserError, match=said) as caught:
        drafter.attach(target_of("llama"))
    assert "\n" not in str(caught.value)


def test_defaults_of_speculators_and_of_flat_configurations(tmp_path):
    config, tensors = with_heads(*published(reference(), "speculators"), rank=256)
    for name in ("sample_from_anchor", "markov_rank", "enable_confidence_head", "confidence_head_with_markov"):
        del config[name]
    network = loaded(tmp_path / "a", config, tensors).network.config
    assert (network.from_anchor, network.markov_rank, network.confidence) == (True, 256, "markov")
    config, tensors = with_heads(*published(reference(), "z-lab"))
    own = config.pop("dflash_config")  # deepseek-ai/DeepSpec
    config = {**config, **own, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    del config["sample_from_anchor"]
    network = loaded(tmp_path / "b", config, tensors).network.config
    assert (network.from_anchor, network.markov_rank, network.confidence) == (True, 6, "markov")


def test_a_markov_head_of_other_draft_tokens_than_the_output_layers_is_refused(tmp_path):
    config, tensors = with_heads(*published(reference(), "z-lab"))
    drafter = loaded(tmp_path, config, tensors)
    drafter.draft_ids = torch.arange(50)
    with pytest.raises(UserError, match="markov_outputs must be the 50 draft tokens: got 101"):
        drafter.attach(target_of("llama"))
