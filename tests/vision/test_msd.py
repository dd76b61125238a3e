"""MSD drafts what its network says, whatever was accepted before: trees against a plain loop without a cache."""

from __future__ import annotations

import pytest
import torch

from mmspec import SamplingParams, UserError, plugins
from mmspec.core.plan import StepPlan
from mmspec.drafters.eagle import Eagle
from mmspec.drafters.registry import make_drafter
from mmspec.vision.drafters.msd import MSD, MSDConfig, MSDNetwork
from tests.drafting import check, network_for, plain_layer, states_of
from tests.targets import prefilled, prompt_of, row_of
from tests.tiny import shared_model
from tests.tiny.models import eagle_network, vision_inputs

# ---------------------------------------------------------------------- drafting


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_trees_follow_the_network(name):
    """Every family is tested with FLASH, whose entries are these where nothing is compressed."""
    model = shared_model(name)
    check(model, vision_inputs(name, 3), MSD(network_for(model), top_k=3, depth=3), new=8)


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


def test_an_accepting_drafter_keeps_true_states():
    """A network trained for a moment has drafts accepted, so that committed states are those of longer paths."""
    model = shared_model("llava")
    network = overfit(model, vision_inputs("llava", 1))
    lengths = check(model, vision_inputs("llava", 1), Eagle(network, top_k=3, depth=4), nodes=16, new=24)
    assert sum(count for length, count in lengths.items() if length > 2) >= 2


def test_a_target_without_attention_gives_no_shape():
    with pytest.raises(UserError, match="requires a target with attention: Mamba2Config has no num_attention_heads"):
        MSDConfig.like(shared_model("mamba2").config)


def overfit(model, inputs):
    """A network that knows one answer of the model by heart."""
    target = plugins.target_class(model.config)(model)
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    said = ids[0, inputs["input_ids"].shape[1] :].tolist()
    hidden, embeds = (t.detach() for t in states_of(model, row_of(inputs, 0), said))
    network = eagle_network(model)
    optimiser = torch.optim.Adam(network.parameters(), 3e-3)
    answer = len(said) - 2
    for _ in range(100):
        fed, losses = hidden, []
        for _ in range(2):  # true states, then its own guesses of them, as a tree feeds it
            outputs = plain_layer(network.requires_grad_(True), network.fc(torch.cat([embeds[1:], fed[:-1]], dim=-1)))
            guess = outputs[-answer - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(target.head(guess), torch.tensor(said[2:])))
            losses.append((guess - hidden[-answer:]).abs().mean())
            fed = torch.cat([hidden[:-answer], guess.detach()])
        optimiser.zero_grad()
        sum(losses).backward()
        optimiser.step()
    return network


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
