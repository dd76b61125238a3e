"""What look-up drafters expect after drafts of another origin."""

import pytest
import torch

from mmspec.core.drafter import Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.small import Small
from mmspec.drafters.union import PerSequence, Union
from mmspec.targets.transformers_target import TransformersTarget
from tests.targets import prefilled
from tests.tiny import shared_model

TEXT = [5, 6, 7, 8, 5, 6, 9, 8, 5, 6, 7, 5]


def begun(drafter, history):
    """The drafter, with one sequence of this history."""
    target = TransformersTarget(shared_model("llama"))
    drafter.attach(target)
    prompt = Prompt(torch.tensor([history[:-1]]))
    output = prefilled(target, prompt, 8)
    drafter.begin(prompt, output, [list(history)])
    return drafter


def first_level(drafter, history):
    """Children of the root of the drafter's tree: tokens and probabilities."""
    tree = drafter.propose(torch.tensor([history[-1]]), StepPlan(nodes=64, depth=1, floor=0.0))
    if tree.nodes == 1:
        return {}
    return dict(zip(tree.tokens[0, 1:].tolist(), tree.path_probs[0], strict=True))


def test_ngram_looks_up_drafts_like_emitted_tokens():
    for path in ((), (6,), (6, 7), (6, 9), (6, 7, 8, 5), (99,), (99, 6)):
        found = dict(begun(Ngram(), TEXT).continuations(0, path))
        longer = [*TEXT, *path]
        expected = first_level(begun(Ngram(), longer), longer)
        # Occurrences in the draft itself are not indexed.
        assert {token: p for token, p in found.items() if token in expected} == found
        if not path:
            assert found == expected
    assert dict(begun(Ngram(), TEXT).continuations(0, (6,)))[7] > dict(begun(Ngram(), TEXT).continuations(0, (6,)))[9]


def test_recycle_looks_up_the_last_two_tokens():
    drafter = begun(Recycle(top_k=3), TEXT)
    drafter._table = {(5, 6): {7: 0.6, 9: 0.3}, (-1, 5): {6: 1.0}, (6, 9): {8: 0.5}}
    assert drafter.continuations(0, (6,)) == [(7, 0.6), (9, 0.3)]
    assert drafter.continuations(0, (6, 9)) == [(8, 0.5)]
    assert drafter.continuations(0, (6, 9, 5)) == [(6, 1.0)]
    assert drafter.continuations(0, (1, 2)) == []
    assert dict(drafter.continuations(0, ())) == first_level(drafter, TEXT)


class Apart(Wrapper):
    """A drafter that does not grow its tree together with others."""

    def __init__(self, drafter):
        self.drafter = drafter


def test_ensembles():
    ngram = dict(begun(Ngram(), TEXT).continuations(0, (6,)))
    union = begun(Union([Recycle(top_k=3), Ngram()]), TEXT)
    union.drafters[0]._table = {(5, 6): {7: 0.1, 11: 0.3}}
    # Odds add up, those of recycled tokens by a reliability of 0.7.
    odds = {token: p / (1 - p) for token, p in ngram.items()} | {11: 0.21 / 0.79}
    odds[7] += 0.07 / 0.93
    found = dict(union.continuations(0, (6,)))
    assert found == pytest.approx({token: odd / (1 + sum(odds.values())) for token, odd in odds.items()})

    union = begun(Union([Apart(Recycle(top_k=3)), Ngram()]), TEXT)
    union.drafters[0].drafter._table = {(5, 6): {7: 0.1, 11: 0.3}}
    found = dict(union.continuations(0, (6,)))
    total = max(1.0, ngram[7] + ngram[9] + 0.3)
    assert found == {7: ngram[7] / total, 9: ngram[9] / total, 11: 0.3 / total}
    alone = begun(PerSequence(Ngram()), TEXT)
    assert dict(alone.continuations(0, (6,))) == ngram


def test_others_expect_nothing():
    assert Small(shared_model("llama")).continuations(0, (5,)) == ()


def test_inputs_are_left_alone():
    history = list(TEXT)
    drafter = begun(Ngram(), history)
    drafter.continuations(0, (6, 7))
    assert drafter.rows[0].own.text == TEXT
