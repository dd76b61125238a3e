"""MSD and FLASH draft what their networks say, whatever was accepted before: trees against a plain loop."""

from math import inf

import pytest
import torch

import mmspec
from mmspec import SamplingParams, UserError, plugins
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters import layer
from mmspec.drafters.eagle import Eagle
from mmspec.drafters.hidden_state import packing
from mmspec.drafters.registry import make_drafter
from mmspec.ops import kernels
from mmspec.vision.drafters.msd import MSD, Flash, MSDConfig, MSDNetwork, find_images
from tests.compiled import needs_kernels
from tests.drafting import check, network_for, plain_layer, states_of
from tests.targets import prefilled, prompt_of, row_of
from tests.tiny import shared_model
from tests.tiny.configs import VISION_CONFIGS
from tests.tiny.models import eagle_network, text_inputs, vision_inputs

NEW = 18


@pytest.mark.parametrize(("cls", "network"), [(MSD, network_for), (Eagle, eagle_network)])
def test_several_images_skipped_steps_and_sampling(cls, network):
    model = shared_model("llava")
    inputs = vision_inputs("llava", 2, images=2)
    check(model, inputs, cls(network(model), top_k=4, depth=4), skip=(1, 3, 4, 7), nodes=12)
    check(model, inputs, cls(network(model), top_k=2, depth=3), params=SamplingParams(temperature=1.0), new=8)


def test_visual_positions_may_have_a_projection_of_their_own():
    model = shared_model("llava")
    drafter = MSD(network_for(model, visual_states=True), top_k=3, depth=3)
    check(model, vision_inputs("llava", 2, images=2), drafter, new=6)
    assert not hasattr(network_for(model, visual_states=True, decoupled=False), "visual_fc")


def trained(doubt):
    """A network that knows one answer by heart; at two of three places, it likes another ``doubt`` times as much."""
    model, inputs = shared_model("llava"), vision_inputs("llava", 1)
    ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    said = ids[0, inputs["input_ids"].shape[1] :]
    hidden, embeds = (t.detach() for t in states_of(model, row_of(inputs, 0), said.tolist()))
    place, wanted = torch.arange(NEW - 2), torch.zeros(NEW - 2, model.config.text_config.vocab_size)
    wanted[place, said[2:]] = 1.0
    wanted[place, (said[2:] + 40) % 90] += doubt * (place % 3 > 0)
    wanted /= wanted.sum(1, keepdim=True)
    network, target = eagle_network(model), plugins.target_class(model.config)(model)
    optimiser = torch.optim.Adam(network.requires_grad_(True).parameters(), 4e-3)
    for _ in range(100):
        fed, loss = hidden, torch.zeros(())
        for _ in range(2):  # true states, then the network's own guesses of them, as a tree feeds it
            guess = plain_layer(network, network.fc(torch.cat([embeds[1:], fed[:-1]], dim=-1)))[-NEW + 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(target.head(guess), wanted)
            loss = loss + (guess - hidden[-NEW + 2 :]).abs().mean()
            fed = torch.cat([hidden[: -NEW + 2], guess.detach()])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network


@pytest.mark.parametrize(("fixed", "doubt", "least"), [(False, 0.0, 3), (True, 0.0, 3), (True, 1.5, 2)])
def test_an_accepting_drafter_keeps_true_states(fixed, doubt, least, monkeypatch):
    """Committed states are those of longer paths, and of paths beside the best child; also with fixed shapes."""
    monkeypatch.setattr(kernels, "static_shapes", lambda device: fixed)
    inputs = vision_inputs("llava", 1)
    lengths = check(shared_model("llava"), inputs, Eagle(trained(doubt), top_k=3, depth=4), nodes=16, new=NEW)
    assert sum(count for length, count in lengths.items() if length >= least) >= 2


def test_a_target_without_attention_gives_no_shape():
    with pytest.raises(UserError, match="requires a target with attention: Mamba2Config has no num_attention_heads"):
        MSDConfig.like(shared_model("mamba2").config)


def test_a_tree_is_bounded_by_the_drafters_own_limits():
    model = shared_model("llava")
    target = plugins.target_class(model.config)(model)
    drafter = MSD(network_for(model), top_k=5, depth=2, total_tokens=9)
    drafter.attach(target)
    prompt = prompt_of(vision_inputs("llava"))
    output = prefilled(target, prompt, 32)
    drafter.begin(prompt, output, [[*prompt.input_ids[0].tolist(), 7]])
    tree = drafter.propose(torch.tensor([7]), StepPlan(64))
    assert (tree.nodes, tree.max_depth) == (10, 2)


def test_wrong_targets_are_named():
    model = shared_model("llava")
    with pytest.raises(UserError, match="hidden size 48: the drafter has 24"):
        MSD(MSDNetwork(MSDConfig(24, 2, 2, 12, 32))).attach(plugins.target_class(model.config)(model))
    with pytest.raises(UserError, match="msd needs a checkpoint"):
        make_drafter("msd")


def test_runs_are_cut_into_images():
    visual = torch.zeros(2, 30, dtype=torch.bool)
    visual[0, 2:9] = visual[0, 10:28] = True  # 7 and 18 entries
    visual[1, 1:3] = visual[1, 4:10] = True  # too few, and 6
    images = find_images(visual, latents=2, span=7)
    pieces = [(0, 2, 9), (0, 10, 16), (0, 16, 22), (0, 22, 28), (1, 4, 10)]
    assert images.row.tolist() == [row for row, _, _ in pieces]
    for index, (_, begin, end) in enumerate(pieces):
        assert images.entry[index][images.inside[index]].tolist() == list(range(begin, end))
    assert images.spot.tolist() == [[3, 7], [11, 14], [17, 20], [23, 26], [5, 8]]
    kept = images.kept(visual)
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 3, 7, 9, 11, 14, 17, 20, 23, 26, 28, 29]
    assert kept[1].nonzero().flatten().tolist() == [0, 1, 2, 3, 5, 8, *range(10, 30)]
    whole = find_images(visual, latents=2, span=0)
    assert whole.inside.sum(1).tolist() == [7, 18, 6]
    assert find_images(visual, latents=18, span=0) is None
    assert find_images(torch.zeros_like(visual), latents=2, span=0) is None


@pytest.mark.parametrize("left", [True, False])
def test_packing_keeps_order(left):
    kept = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 1, 0]]).bool()
    order, valid = packing(kept, left)
    assert [row[keep].tolist() for row, keep in zip(order, valid, strict=True)] == [[0, 2, 3, 5], [2, 4]]
    assert valid.tolist() == [[True] * 4, [False, False, True, True] if left else [True, True, False, False]]


@pytest.mark.parametrize("name", sorted(VISION_CONFIGS))
def test_all_of_flash_on_every_family(name):
    model = shared_model(name)
    drafter = Flash(network_for(model, latents=3, span=16, slots=2), top_k=3, depth=4)
    check(model, vision_inputs(name, 2), drafter, new=8)


@pytest.mark.parametrize(
    ("latents", "span", "slots"), [(0, 0, 1), (0, 0, 5), (1, 0, 1), (5, 16, 1), (5, 16, 3), (5, 0, 2), (16, 16, 5)]
)
def test_both_ideas_apart_and_together(latents, span, slots):
    """Two images in one run; three rows with padding of their own, some steps without a draft, trees of 6 levels."""
    model = shared_model("llava")
    drafter = Flash(network_for(model, latents=latents, span=span, slots=slots), top_k=3, depth=6)
    check(model, vision_inputs("llava", 3, images=2), drafter, skip=(1, 3, 4), nodes=16, depth=6, new=9)


@pytest.mark.parametrize(
    ("slots", "changes"),
    [
        (1, {"reads": [0, 1]}),
        (2, {"reads": [1, 0], "latents": 3}),
        (1, {"norm_output": True}),
        (2, {"norm_output": True}),
        (1, {"confidence": True}),
        (2, {"confidence": True}),
        (4, {"rank": 5, "head": 9}),
        (4, {"rank": 5, "head": 9, "confidence": True, "norm_output": True, "reads": [1]}),
        (2, {"hide_visual": True}),
    ],
)
def test_settings_of_the_network(slots, changes):
    model = shared_model("llava")
    network = network_for(model, slots=slots, **changes)
    ids = torch.randperm(101, generator=torch.Generator().manual_seed(1))[:9]
    check(model, vision_inputs("llava", 3, images=2), Flash(network, ids, top_k=3, depth=4), nodes=12, new=9)


@needs_kernels
@pytest.mark.parametrize("changes", [{}, {"latents": 3}, {"rank": 5, "head": 9}, {"slots": 2}], ids=str)
def test_trees_of_the_kernels(changes):
    """Three rows. With two slots the layer has two passes per tree of four levels, which are not the kernels'."""
    model = shared_model("llava")
    ids = torch.randperm(101, generator=torch.Generator().manual_seed(1))[:9]
    drafter = Flash(network_for(model, **{"slots": 4, **changes}), ids, top_k=3, depth=4)
    check(model, vision_inputs("llava", 3, images=2), drafter, nodes=12, new=9)
    assert drafter.native is not None


def test_settings_that_do_not_fit_the_drafter_or_target():
    model = shared_model("llava")
    network = network_for(model, slots=3, rank=2, head=9)
    with pytest.raises(UserError, match="depth must be at most the 3 slots of a pass, with rank: got 4"):
        Flash(network, torch.arange(9), depth=4)
    with pytest.raises(UserError, match="head must have a row per draft token, 8: got 9"):
        Flash(network, torch.arange(8), depth=3)
    target = plugins.target_class(model.config)(model)
    with pytest.raises(UserError, match=r"reads must name layers of the target, below 2: got \[0, 2\]"):
        Flash(network_for(model, reads=[0, 2])).attach(target)


@pytest.mark.parametrize("slots", [2, 3])
def test_trees_deeper_than_several_passes(slots):
    """Chains of which each pass of the layer continues the one before, three passes deep."""
    model = shared_model("llava")
    depth = 3 * slots + 1
    network = network_for(model, latents=3, span=16, slots=slots)
    drafter, deepest = Flash(network, top_k=1, depth=depth), []
    propose = drafter.propose
    drafter.propose = lambda *asked: deepest.append(propose(*asked)) or deepest[-1]
    check(model, vision_inputs("llava"), drafter, nodes=depth, depth=depth, new=depth + 2)
    assert max(tree.max_depth for tree in deepest) == depth


def test_rows_with_unequal_numbers_of_images():
    model = shared_model("llava")
    prompts = [prompt_of(vision_inputs("llava", 1, images, seed=images)) for images in (1, 2)]
    target = plugins.target_class(model.config)(model)
    drafter = Flash(network_for(model, latents=3, span=16, slots=2), top_k=3, depth=5)
    drafter.attach(target)

    def tree(prompt):
        output = prefilled(target, prompt, 32)
        drafter.begin(prompt, output, [[*row, 7] for row in prompt.unpadded()])
        found = drafter.propose(torch.tensor([7] * len(prompt.input_ids)), StepPlan(20, 5))
        target.keep([])
        drafter.select([])
        return found

    both = tree(Prompt.stack(prompts))
    for row, alone in enumerate(map(tree, prompts)):
        assert torch.equal(both.tokens[row], alone.tokens[0])
        assert torch.equal(both.parents[row], alone.parents[0])


def test_text_only_narrow_head_norm_and_sampling():
    model = shared_model("qwen2")
    network = network_for(model, latents=4, slots=3, input_norm=True, qkv_bias=True)
    check(model, text_inputs(3), Flash(network, torch.tensor([5, 9, 2, 40, 41, 60]), top_k=4, depth=5), new=8)
    model = shared_model("llava")
    drafter = Eagle(eagle_network(model, slots=2), top_k=2, depth=4)
    check(model, vision_inputs("llava", 2), drafter, params=SamplingParams(temperature=1.0), new=8)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("widest", [0, 4])
def test_draft_vocabularies_that_are_looked_up_and_not(slots, widest, monkeypatch):
    monkeypatch.setattr(layer, "_MAX_RATIO", widest)
    model = shared_model("llava")
    ids = torch.randperm(101, generator=torch.Generator().manual_seed(1))[:9]
    drafter = Flash(network_for(model, slots=slots), ids, top_k=4, depth=3)
    check(model, vision_inputs("llava", 2), drafter, new=8)


def test_a_plan_stops_between_passes_too():
    class Shy:
        """Two levels after the first may add any number of tokens, the next one none."""

        nodes, depth, chain, asked = 60, 12, False, 0

        @property
        def least_gain(self):
            self.asked += 1
            return 0.0 if self.asked < 3 else inf

    model = shared_model("llava")
    target = plugins.target_class(model.config)(model)
    prompt = prompt_of(vision_inputs("llava"))
    for slots in (1, 2, 5):
        drafter = Flash(network_for(model, slots=slots), top_k=4, depth=8)
        drafter.attach(target)
        drafter.begin(prompt, prefilled(target, prompt, 32), [[7]])
        assert drafter.propose(torch.tensor([7]), Shy()).max_depth == 3


def test_the_cache_holds_latents_only():
    model = shared_model("llava")
    target = plugins.target_class(model.config)(model)
    prompt = prompt_of(vision_inputs("llava", images=3))
    lengths = []
    for latents in (0, 2):
        drafter = Flash(network_for(model, latents=latents, span=16))
        drafter.attach(target)
        drafter.begin(prompt, prefilled(target, prompt, 32), [[7]])
        lengths.append(drafter.cache.length)
    assert lengths[0] - lengths[1] == 3 * 16 - 1 - 3 * 2  # the first token of the row has no entry


def test_a_fork_shares_what_is_looked_up_and_not_what_is_cached():
    pipe = mmspec.load("tiny-llava", dtype="float32")
    pipe.generate("What is it?", max_new_tokens=4)
    drafter = pipe.drafter
    copied = drafter.fork(pipe.target)
    assert copied.node_inputs is drafter.node_inputs
    assert copied.cell_input is drafter.cell_input
    assert copied.network is drafter.network
    assert copied.cache is not drafter.cache
