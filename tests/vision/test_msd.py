"""MSD drafts what its network says, whatever was accepted before: trees against a plain loop without a cache."""

import pytest
import torch

from mmspec import SamplingParams, UserError, plugins
from mmspec.core.plan import StepPlan
from mmspec.drafters.eagle import Eagle
from mmspec.drafters.registry import make_drafter
from mmspec.engine.stopping import Stopper
from mmspec.ops import kernels
from mmspec.sampling.sampler import Sampler
from mmspec.vision.drafters.msd import MSD, MSDConfig, MSDNetwork
from tests.decoding import decode
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


NEW = 18


@pytest.fixture(scope="module")
def doubtful():
    """A network that knows one answer by heart, and likes another token a little more at two of three places."""
    model, inputs = shared_model("llava"), vision_inputs("llava", 1)
    ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    said = ids[0, inputs["input_ids"].shape[1] :]
    hidden, embeds = (t.detach() for t in states_of(model, row_of(inputs, 0), said.tolist()))
    place, wanted = torch.arange(NEW - 2), torch.zeros(NEW - 2, model.config.text_config.vocab_size)
    wanted[place, said[2:]] = 1.0
    wanted[place, (said[2:] + 40) % 90] += 1.5 * (place % 3 > 0)
    wanted /= wanted.sum(1, keepdim=True)
    network, target = eagle_network(model), plugins.target_class(model.config)(model)
    optimiser = torch.optim.Adam(network.requires_grad_(True).parameters(), 6e-3)
    for _ in range(70):
        guess = plain_layer(network, network.fc(torch.cat([embeds[1:], hidden[:-1]], dim=-1)))[-NEW + 1 : -1]
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(target.head(guess), wanted).backward()
        optimiser.step()
    return network


def drafted(network, fixed, patch):
    """One answer, its trees and the accepted paths; without those near its end, where varying shapes are shallower."""
    patch.setattr(kernels, "static_shapes", lambda device: fixed)
    model = shared_model("llava")
    target = plugins.target_class(model.config)(model)
    drafter, trees, paths = Eagle(network, top_k=3, depth=3, total_tokens=12), [], []
    drafter.attach(target)
    propose, commit = drafter.propose, target.commit

    def noted(token, plan):
        tree = propose(token, plan)
        if plan.depth == 3:
            trees.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree

    drafter.propose = noted
    target.commit = lambda verdict: paths.append(verdict.host[0][0]) or commit(verdict)
    *_, (row,) = decode(target, drafter, prompt_of(vision_inputs("llava")), Sampler(), Stopper(NEW), StepPlan(12, 3))
    return row.token_ids, trees, paths[: len(trees)]


def test_an_accepting_drafter_keeps_true_states(doubtful):
    """Committed states are those of longer paths."""
    inputs = vision_inputs("llava", 1)
    lengths = check(shared_model("llava"), inputs, Eagle(doubtful, top_k=3, depth=4), nodes=16, new=NEW)
    assert sum(count for length, count in lengths.items() if length > 2) >= 2


def test_captured_steps_keep_their_states(doubtful, monkeypatch):
    """Steps of fixed shapes draft what those of varying shapes do, which are tested against a plain loop."""
    said, trees, paths = drafted(doubtful, True, monkeypatch)
    answer, others, taken = drafted(doubtful, False, monkeypatch)
    # Near the end, one more is drafted before the tokens are there.
    assert (said, trees[: len(others)], paths[: len(taken)]) == (answer, others, taken)
    assert sum(path != list(range(len(path))) for path in paths) >= 3


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
