"""DFlash drafts what transformers' implementation of its network does, on every kind of target, in every layout."""

from __future__ import annotations

import copy
from itertools import pairwise, product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmspec
from mmspec import SamplingParams, UserError, plugins
from mmspec.core.budget import Budget
from mmspec.core.target import Prompt
from mmspec.drafters import layouts
from mmspec.drafters.dflash import DFlash, default_layer_ids, plain_embedding
from mmspec.drafters.growth import grow_slots
from mmspec.drafters.registry import make_drafter
from mmspec.ops import kernels
from mmspec.training.dflash import DFlashObjective
from mmspec.training.features import Features
from tests.dflash import BLOCK, WIDTH, check_blocks, published, reference, write
from tests.tiny import shared_model
from tests.tiny.configs import VOCAB
from tests.tiny.models import dflash_network, text_inputs, vision_inputs

LAYOUTS = ["z-lab", "transformers", "speculators"]


def drafter_of(tmp_path, plain, layout="z-lab", **changes):
    """A drafter of the reference's weights, read from a folder; trees of three children per node."""
    drafter = make_drafter(str(write(tmp_path, *published(plain, layout, **changes))))
    assert isinstance(drafter, DFlash)
    drafter.top_k = 3
    return drafter


# ---------------------------------------------------------------------- what is drafted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_have_the_probabilities_of_the_reference(layout, tmp_path):
    plain = reference()
    check_blocks(shared_model("llama"), text_inputs(3), drafter_of(tmp_path, plain, layout), plain, skip=(1, 4))


def test_nodes_while_sampling(tmp_path):
    plain = reference()
    params = SamplingParams(temperature=1.0)
    check_blocks(shared_model("llama"), text_inputs(3), drafter_of(tmp_path, plain), plain, params=params)


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl"])
def test_nodes_after_images(name, tmp_path):
    """Of a target with several position axes, the largest is a token's position."""
    plain = reference()
    check_blocks(shared_model(name), vision_inputs(name, 2), drafter_of(tmp_path, plain), plain, new=8)


@pytest.mark.parametrize("name", ["bamba", "qwen3_5_text", "lfm2"])
def test_nodes_of_hybrids(name, tmp_path):
    plain = reference(target_layer_ids=[0])
    check_blocks(shared_model(name), text_inputs(3), drafter_of(tmp_path, plain), plain, new=8)


def test_scaled_positions_and_layers_without_windows(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    plain = reference(rope_parameters=rope, layer_types=["full_attention"] * 2)
    drafter = drafter_of(tmp_path, plain, "transformers")
    check_blocks(shared_model("llama"), text_inputs(2), drafter, plain)


def test_a_draft_vocabulary_with_an_output_layer_of_its_own(tmp_path):
    plain, ids = reference(), torch.arange(4, 80, 2)
    config, tensors = published(plain, "speculators", draft_vocab_size=len(ids))
    head = torch.nn.Linear(WIDTH, len(ids), bias=False)
    tensors["lm_head.weight"], tensors["d2t"] = head.weight.detach(), ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    drafter = make_drafter(str(write(tmp_path, config, tensors)))
    drafter.top_k = 3
    assert torch.equal(drafter.draft_ids, ids)
    check_blocks(shared_model("llama"), text_inputs(2), drafter, plain, ids=ids.tolist(), head=head)


def test_an_embedding_of_its_own_may_have_fewer_tokens_than_the_target(tmp_path):
    config, tensors = published(reference(), "speculators")
    config["transformer_layer_config"]["vocab_size"] = 100
    tensors["embed_tokens.weight"] = torch.randn(100, WIDTH)
    drafter, model = make_drafter(str(write(tmp_path, config, tensors))), shared_model("llama")
    drafter.attach(plugins.target_class(model.config)(model))
    assert torch.equal(drafter.draft_ids, torch.arange(100))
    expected = tensors["embed_tokens.weight"][[5, 99, 0]]
    assert torch.equal(drafter.embed(torch.tensor([5, 99, 100])), expected)


def test_a_table_that_norms_embeddings_is_read_without_the_norm():
    model = shared_model("llama")
    target, tokens = plugins.target_class(model.config)(model), torch.tensor([5, 7])
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
    """Of near-uniform slots, a level has many nodes with children."""
    g = torch.Generator().manual_seed(nodes)
    log_probs = (spread * torch.randn(2, 4, 5, generator=g)).log_softmax(-1).sort(descending=True).values
    tokens = torch.stack([torch.randperm(50, generator=g)[:5] for _ in range(8)]).view(2, 4, 5)
    roots, budget = torch.tensor([3, 4]), Budget(nodes, 4)
    host = grow_slots(roots, tokens, log_probs, budget, 64)
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    static = grow_slots(roots, tokens, log_probs, budget, 64)
    assert torch.equal(host.tokens, static.tokens)
    assert torch.equal(host.parents, static.parents)
    torch.testing.assert_close(host.log_probs, static.log_probs)
    for row in range(2):
        ranks = (path for depth in range(1, 5) for path in product(range(5), repeat=depth))
        every = [sum(float(log_probs[row, level, rank]) for level, rank in enumerate(path)) for path in ranks]
        assert host.log_probs[row, 1:].tolist() == pytest.approx(sorted(every, reverse=True)[:nodes], abs=1e-4)


def test_default_layers_are_evenly_spaced():
    assert [default_layer_ids(layers) for layers in (36, 6, 3, 1)] == [[1, 9, 17, 25, 33], [1, 2, 3], [0, 1, 2], [0]]


# ---------------------------------------------------------------------- against generate of transformers


class Passes:
    """Tokens that each verify pass of a model emitted, from the length of its cache at each."""

    def __init__(self, model):
        self._lengths: list[int] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs):
        self._lengths.append(kwargs["past_key_values"].get_seq_length())

    @property
    def emitted(self):
        return [after - before for before, after in pairwise(self._lengths[1:])]


def trained(model, prompts, steps):
    """A drafter that has learnt a target's answers by heart."""
    target = plugins.target_class(model.config)(model)
    network = dflash_network(model, window=0, sliding=[], block_size=8, target_layer_ids=[0, 1])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.ones_like(parameter) if parameter.ndim == 1 else parameter / 2)
        tokens = model.generate(prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    target.features = ("last", *network.config.features(2))
    found = target.prefill(Prompt(tokens), 1).features
    layers = torch.cat([found[name] for name in network.config.features(2)], dim=-1).clone()
    keep = torch.ones_like(tokens, dtype=torch.bool)
    answer = keep & (torch.arange(tokens.shape[1]) >= prompts.shape[1])
    batch = Features(tokens, found["last"].clone(), layers[..., :0], ~keep, answer, keep, layers)
    optimiser, generator = torch.optim.Adam(network.parameters(), 5e-3), torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimiser.zero_grad()
        DFlashObjective(anchors=16)(network, target, batch, generator=generator).total.backward()
        optimiser.step()
    return DFlash(network)


def test_a_trained_chain_accepts_what_generate_accepts_and_a_tree_more(tmp_path):
    model, prompts = copy.deepcopy(shared_model("llama")), text_inputs(4, 6)["input_ids"].clamp(min=3)
    model.get_output_embeddings().weight.data *= 3.0  # the same answers, of which the target is surer
    drafter = trained(model, prompts, 90)
    layouts.write(drafter, model.config, tmp_path, "z-lab")
    config = drafter.network.config
    plain = reference(
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        block_size=8,
        target_layer_ids=[0, 1],
        rms_norm_eps=1e-6,
        head_dim=config.head_dim,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.mlp,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    state, layout = drafter.network.state_dict(), layouts.LAYOUTS["dflash"]
    plain.load_state_dict(layouts.unstack(state, layouts.published_names(state, layout.names, layout.prefixes), config))
    lengths = {}
    for kind in ("chain", "tree"):
        mine = make_drafter(str(tmp_path))
        if kind == "chain":
            mine.draft_chains(7)
        lengths[kind] = []
        for prompt in prompts:
            options = {"input_ids": prompt[None], "max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
            out = mmspec.generate(
                model, drafter=mine, nodes=7 if kind == "chain" else 14, return_dict_in_generate=True, **options
            )
            lengths[kind].append(out.stats[0].accept_lengths)
            if kind == "chain":
                passes = Passes(model)
                expected = model.generate(assistant_model=plain, speculation_type="dflash", pad_token_id=0, **options)
                assert out.sequences.tolist() == expected.tolist()
                model._forward_pre_hooks.clear()
                # The last pass is not followed by another one.
                assert out.stats[0].accept_lengths[:-1] == passes.emitted
    mean = {kind: sum(map(sum, found)) / sum(map(len, found)) for kind, found in lengths.items()}
    assert mean["chain"] > 1.5
    assert mean["tree"] > mean["chain"] + 0.1


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_missing_further_or_misshapen_is_named(layout, tmp_path):
    config, tensors = published(reference(), layout)
    for name, value in tensors.items():
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        for changed, said in (
            (rest, f"missing {name}"),
            (tensors | {f"{name}.more": value.clone()}, f"unknown {name}.more"),
            (tensors | {name: value[:-1].clone()}, f"{name} must be "),
            (tensors | {name: value.int()}, f"{name} must be a floating point tensor"),
        ):
            with pytest.raises(UserError, match=said) as caught:
                make_drafter(f"dflash:{write(tmp_path, config, changed)}")
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("block_size", 1, "block_size must be a whole number in \\[2, 64\\]: got 1"),
        ("block_size", None, "block_size must be a whole number >= 1: got None"),
        ("mask_token_id", None, "mask_token_id must be a whole number >= 0: got None"),
        ("target_layer_ids", None, "layer_ids must be a list of layers: got None"),
        ("target_layer_ids", [], "layer_ids must (be a list|name 1 to 64) "),
        ("target_layer_ids", [1, -3], "layer_ids must (be a list|name 1 to 64) "),
        ("layer_types", ["full_attention"], "layer_types must be 2 of sliding_attention and full_attention"),
        ("layer_types", ["full_attention", "chunked"], "layer_types must be 2 of sliding_attention"),
        ("sliding_window", None, "sliding_window must be a whole number >= 1: got None"),
        ("num_hidden_layers", None, "num_hidden_layers must be a whole number >= 1: got None"),
        ("hidden_act", "gelu", "hidden_act must be 'silu': got 'gelu'"),
        ("attention_bias", True, "attention_bias must be unset or false: got True"),
        ("causal_head", 1, "causal_head must be True or False: got 1"),
        ("use_swa", True, "use_swa must be unset or false: got True"),
    ],
)
def test_configurations_that_cannot_be_are_refused_by_name(layout, field, value, said, tmp_path):
    config, tensors = published(reference(), layout)
    if layout == "speculators" and field == "target_layer_ids":
        field = "aux_hidden_state_layer_ids"
    for place in (config, config.get("dflash_config"), config.get("transformer_layer_config")):
        if place is not None and (place is config or field in place):
            place[field] = value
    with pytest.raises(UserError, match=said) as caught:
        make_drafter(f"dflash:{write(tmp_path, config, tensors)}")
    assert "\n" not in str(caught.value)


def test_a_block_size_may_be_nested(tmp_path):
    config, tensors = published(reference(), "z-lab")
    config["dflash_config"]["block_size"] = config.pop("block_size")
    assert make_drafter(str(write(tmp_path, config, tensors))).network.config.block_size == BLOCK


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 40}, "hidden size 48 and 40 tokens: got .* and 101 tokens"),
        ({"vocab_size": 140}, "hidden size 48 and 140 tokens: got .* and 101 tokens"),
        ({"mask": VOCAB}, "mask_token_id must be a token below 101: got 101"),
        ({"layers": [0, 2]}, "reads outputs of layers 0, 2: the target has 2 layers"),
    ],
)
def test_targets_that_do_not_fit_are_refused(changes, said, tmp_path):
    changes = dict(changes)
    own = {"mask_token_id": changes.pop("mask", 99), "target_layer_ids": changes.pop("layers", [1, 0])}
    drafter = drafter_of(tmp_path, reference(), dflash_config=own, **changes)
    model = shared_model("llama")
    with pytest.raises(UserError, match=said) as caught:
        drafter.attach(plugins.target_class(model.config)(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_width_that_is_not_the_targets_is_refused(layout, tmp_path):
    drafter = drafter_of(tmp_path, reference(), layout)
    other = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2))
    known = "" if layout == "transformers" else " and 101 tokens"
    with pytest.raises(UserError, match=f"a target of hidden size 48{known}: got LlamaForCausalLM with hidden size 32"):
        drafter.attach(plugins.target_class(other.config)(other))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", ["msd", "eagle", "eagle3", "mtp"])
def test_other_drafters_do_not_read_blocks(layout, other, tmp_path):
    folder = write(tmp_path, *published(reference(), layout))
    with pytest.raises(UserError) as caught:
        make_drafter(f"{other}:{folder}")
    assert "\n" not in str(caught.value)
    if other in ("msd", "eagle"):
        assert f"received a DFlash drafter: use dflash:{folder}" in str(caught.value)
