"""Several drafters in one tree."""

import pytest
import torch

import mmspec
from mmspec import UserError
from mmspec.core.budget import Budget
from mmspec.core.drafter import learns, lend, members
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.small import Small
from mmspec.drafters.union import Union
from mmspec.loading import make_drafter
from mmspec.targets.transformers_target import TransformersTarget
from tests.mmspec.drafters.test_drafters import begun, paths
from tests.tiny import shared_model
from tests.tiny.models import text_inputs


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_those_of_the_target(batch, sampled):
    model = shared_model("llama")
    inputs, options = text_inputs(batch, 9), dict(max_new_tokens=24, eos_token_id=None, do_sample=sampled)
    if not sampled:
        reference = model.generate(**inputs, **options)
    else:
        torch.manual_seed(5)
        reference = mmspec.generate(model, drafter=None, **inputs, **options)
    torch.manual_seed(5)
    union = Union([Small(shared_model("llama"), top_k=2), Ngram(), Recycle()])
    out = mmspec.generate(model, drafter=union, nodes=12, return_dict_in_generate=True, **inputs, **options)
    assert torch.equal(out.sequences, reference)
    # The draft model is the target itself: what it proposes must survive the merge.
    assert sampled or min(stats.mean_acceptance_length for stats in out.stats) > 3


def test_every_member_sees_every_step_and_proposes():
    """Members that know nothing of each other's nodes, each on the tokens that it alone can draft."""
    row = [[4, 5, 6, 4, 5]]
    ngram, recycle = Ngram(), Recycle()
    union = Union([ngram, recycle])
    logits = begun(union, row)
    row[0].append(4)
    tree = union.propose(torch.tensor([4]), Budget(30, depth=3))
    alone = [path for drafter in (ngram, recycle) for path in paths(drafter.propose(torch.tensor([4]), Budget(30, 3)))]
    assert sorted(paths(tree)) == sorted({tuple(path): path for path in alone}.values())
    assert [5, 6] in paths(tree)
    assert recycle.entries > 0
    assert logits.shape[0] == 1


def test_names_joined_by_plus():
    union = make_drafter("ngram+recycle")
    assert isinstance(union, Union)
    assert [type(member) for member in union.drafters] == [Ngram, Recycle]
    assert members(union) == union.drafters
    assert learns(union)
    assert not learns(Union([Ngram(), Ngram(longest=2)]))
    for name, message in (
        ("ngram+none", "^names joined by + must each be a drafter's: got 'ngram+none'$"),
        ("ngram+nonsense", "nonsense"),
        ("ngram+", "must each be a drafter's: got 'ngram+'$"),
    ):
        with pytest.raises(UserError, match=message.replace("+", r"\+")):
            make_drafter(name)
    with pytest.raises(UserError, match=r"^drafters joined by \+ must be at least two: got 1$"):
        Union([Ngram()])


def test_a_lent_union_shares_weights_and_forgets():
    target = TransformersTarget(shared_model("llama"))
    union = Union([Small(shared_model("qwen3")), Recycle()])
    union.attach(target)
    lent = lend(union, target)
    assert lent is not union
    assert lent.drafters[0].model is union.drafters[0].model
    lent.drafters[1]._table[1, 2] = {3: 1.0}
    assert union.drafters[1].entries == 0
