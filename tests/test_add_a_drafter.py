"""The lookup drafter of docs/add-a-drafter.md, run as written there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mmspec
from mmspec import Drafter, UserError, plugins
from mmspec.core.plan import StepPlan
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.registry import drafter_spec, make_drafter
from mmspec.drafters.union import Union
from tests.tiny import shared_model
from tests.tiny.models import text_inputs, vision_inputs

PAGE = Path(__file__).parent.parent / "docs/add-a-drafter.md"


@pytest.fixture(scope="module")
def bigram():
    names = {}
    exec(PAGE.read_text().split("```python\n")[1].partition("```")[0], names)
    return names["Bigram"]


@pytest.mark.parametrize(("name", "batch"), [("llama", 1), ("llava", 3), ("bamba", 3)])
def test_its_output_equals_generate(name, batch, bigram):
    model = shared_model(name)
    inputs = vision_inputs(name, batch, 1, 0) if name == "llava" else text_inputs(batch, 9, 0)
    options = {**inputs, "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**options)
    chains = bigram()
    chains.draft_chains(8)
    for drafter in (bigram(), chains, Union([bigram(), Ngram()])):
        output = mmspec.generate(model, drafter=drafter, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected)


def test_it_drafts_what_followed_the_last_token(bigram):
    drafter = bigram()
    drafter.begin(None, None, [[5, 6, 5, 7, 5, 6, 5]])
    tree = drafter.propose(torch.tensor([5]), StepPlan(nodes=3, depth=1))
    assert tree.tokens.tolist() == [[5, 6, 7]]
    assert tree.path_probs == [[pytest.approx(2 / 4), pytest.approx(1 / 4)]]


def test_copies_share_networks_and_the_target(bigram):
    drafter, target = bigram(), object()
    drafter.other = torch.nn.Linear(2, 2)
    drafter.attach(target)
    drafter.begin(None, None, [[5, 6]])
    copied = drafter.fork(target)
    assert copied.other is drafter.other
    copied.begin(None, None, [[7, 8, 7]])  # it has no rows
    assert copied.propose(torch.tensor([7]), StepPlan(depth=1)).tokens.tolist() == [[7, 8]]
    assert drafter.lend(target) is drafter  # it learns nothing


def test_members_have_defaults():
    class Bare(Drafter):
        begin = select = propose = observe = None

    bare = Bare()
    assert (bare.learns, bare.tree_size, tuple(bare.features)) == (True, None, ())
    assert tuple(bare.continuations(0, ())) == ()
    with pytest.raises(UserError, match="chains need a drafter that can draft them: Bare cannot"):
        bare.draft_chains(5)


def test_a_class_may_be_registered_without_a_declaration(bigram, monkeypatch):
    found = plugins.find
    monkeypatch.setattr(plugins, "names", lambda group: ["bigram"])
    monkeypatch.setattr(plugins, "find", lambda group, name: bigram if name == "bigram" else found(group, name))
    assert isinstance(make_drafter("bigram"), bigram)
    assert drafter_spec("bigram").summary.startswith("Bigram drafter: the tokens that followed")
    with pytest.raises(UserError, match="drafter 'bigram' does not take the argument 'x'"):
        make_drafter("bigram:x")
