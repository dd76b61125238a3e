"""What is accepted need not be what the drafter likes best: its true states are kept wherever in the tree it stands."""

from __future__ import annotations

import pytest
import torch

from mmspec import plugins
from mmspec.core.plan import StepPlan
from mmspec.drafters.eagle import Eagle
from mmspec.engine.stopping import Stopper
from mmspec.ops import kernels
from mmspec.sampling.sampler import Sampler
from tests.decoding import decode
from tests.drafting import plain_layer, states_of
from tests.targets import prompt_of, row_of
from tests.tiny import shared_model
from tests.tiny.models import eagle_network, vision_inputs

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


def test_captured_steps_keep_their_states(doubtful, monkeypatch):
    """Steps of fixed shapes draft what those of varying shapes do, which are tested against a plain loop."""
    said, trees, paths = drafted(doubtful, True, monkeypatch)
    answer, others, taken = drafted(doubtful, False, monkeypatch)
    # Near the end, one more is drafted before the tokens are there.
    assert (said, trees[: len(others)], paths[: len(taken)]) == (answer, others, taken)
    assert sum(path != list(range(len(path))) for path in paths) >= 3
