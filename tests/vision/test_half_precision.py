"""Vision models and their drafters in bfloat16, past position 256."""

import copy

import pytest
import torch

from mmspec import accept_path, plugins
from mmspec.core.plan import StepPlan
from mmspec.drafters.layer import Rotary, rotary_frequencies
from mmspec.vision.drafters.msd import MSD, Flash
from tests.drafting import network_for, plain_gain
from tests.half import check_decoding, half_model, in_dtype, long_inputs
from tests.targets import prefilled, prompt_of
from tests.tiny import root_path, valid_nodes

DRAFTERS = {
    "msd": lambda model: MSD(network_for(model), top_k=3, depth=2),
    "flash": lambda model: Flash(network_for(model, latents=3, span=16, slots=2), top_k=3, depth=2),
}


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "llava_bamba"])
def test_decoding(name):
    check_decoding(name)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("kind", DRAFTERS)
@torch.no_grad()
def test_drafting(kind, name):
    """Path probabilities are about those of a plain loop in float32: behind a prompt, and behind what was accepted."""
    model = half_model(name)
    exact = copy.deepcopy(model).float()
    target, exact_target = (plugins.target_class(m.config)(m) for m in (model, exact))
    drafter, exact_drafter = DRAFTERS[kind](model), DRAFTERS[kind](exact)
    drafter.attach(target)
    exact_drafter.attach(exact_target)
    exact_drafter.network.load_state_dict(in_dtype(drafter.network.state_dict(), torch.float32))

    prompt, said = prompt_of(long_inputs(name)), [7]
    prefill = output = prefilled(target, prompt, 32)
    assert output.features["last"].shape[1] > 256
    history = [[*row, *said] for row in prompt.unpadded()]
    drafter.begin(prompt, output, history)
    hidden = [output.features["last"][0]]
    for _ in range(2):
        tree = drafter.propose(torch.tensor(said[-1:]), StepPlan(5, 2))
        nodes = valid_nodes(tree, 0)[1:]
        embeds = torch.cat([prefill.embeds[0], target.embed(torch.tensor(said))]).float()
        visual = torch.nn.functional.pad(prefill.visual[0], (0, len(said)))
        states = torch.cat([*hidden, hidden[0][:1]]).float()  # the root's own is not known yet
        expected = [
            plain_gain(exact_drafter, exact_target, states, embeds, visual, tree.tokens[0, path[1:]].tolist())
            for path in (root_path(tree, 0, node) for node in nodes)
        ]
        assert tree.path_probs[0] == pytest.approx(expected, abs=0.06)
        # The first child is accepted; the tree's states are those of the target.
        output = target.verify(tree, drafter.features)
        verdict = accept_path(tree, tree.tokens[:, 1:2].expand_as(tree.tokens))
        target.commit(verdict)
        drafter.observe(tree, verdict, output)
        ((path, tokens),) = verdict.host
        hidden.append(output.features["last"][0, path])
        said += tokens


def test_rotation_is_computed_in_float32():
    rotary, exact = Rotary(rotary_frequencies(12, 10000.0)), Rotary(rotary_frequencies(12, 10000.0))
    rotary.reserve(2000, torch.empty(0, dtype=torch.bfloat16))
    exact.reserve(2000, torch.empty(0, dtype=torch.float64))
    for low, full in zip(rotary(slice(0, 2000)), exact(slice(0, 2000)), strict=True):
        torch.testing.assert_close(low.double(), full, atol=2**-8, rtol=0)
