"""How far the n-gram drafter trusts what it copies, and where it goes on with a copy."""

import pytest
import torch

from mmspec.core.plan import StepPlan
from mmspec.drafters.ngram import Ngram
from tests.mmspec.drafters.test_drafters import begun, paths, target_of
from tests.mmspec.engine.test_engine import VOCAB

SOURCE = list(range(100, 160))  # no token twice: a match of any length is the only one
SHORT = [*range(20, 60)]


def saying(drafter, prompt, *said):
    """The drafter, after steps that emitted these tokens."""
    history = list(prompt)
    begun(drafter, [history])
    for tokens in said:
        drafter.propose(torch.tensor([history[-1]]), StepPlan(1))
        history += tokens
    return drafter


def first_level(drafter):
    return dict(drafter.continuations(0, ()))


def tree_of(drafter, nodes=16, depth=16, floor=0.1):
    return drafter.propose(torch.tensor([drafter.rows[0].own.text[-1]]), StepPlan(nodes, depth, floor=floor))


@pytest.mark.parametrize(
    ("length", "trust"), [(1, 0.12), (2, 0.3), (4, 0.55), (5, 0.65), (8, 0.8), (13, 0.85), (40, 0.94)]
)
def test_a_match_is_first_trusted_by_its_length(length, trust):
    """Longer than any suffix that is looked up, too."""
    drafter = saying(Ngram(), [1, *SOURCE, 2, *SOURCE[:length]])
    assert first_level(drafter) == {SOURCE[length]: pytest.approx(trust)}


def test_of_two_places_the_longer_match_is_likelier():
    """Both match the longest suffix that is looked up, of four tokens."""
    drafter = saying(Ngram(), [*SOURCE[:12], 7, 1, *SOURCE[8:12], 8, 2, *SOURCE[:12]])
    odds = {7: 0.85 / 0.15, 8: 0.55 / 0.45}
    assert first_level(drafter) == pytest.approx({token: odd / (1 + sum(odds.values())) for token, odd in odds.items()})
    agreeing = saying(Ngram(), [*SOURCE[:12], 7, 1, *SOURCE[8:12], 7, 2, *SOURCE[:12]])
    assert first_level(agreeing)[7] == pytest.approx(1 - 1 / (1 + sum(odds.values())))


def test_a_long_copy_is_drafted_deep():
    depths = []
    for copied in (1, 4, 30):
        drafter = saying(Ngram(), [*SOURCE, 1, 2, SOURCE[0]], *([token] for token in SOURCE[1:copied]))
        tree = tree_of(drafter)
        assert tree.nodes == 1 or paths(tree)[-1] == SOURCE[copied : copied + tree.nodes - 1]
        depths.append(tree.max_depth)
    assert depths == sorted(depths)
    assert depths[0] <= 2
    assert depths[-1] == 16


def test_matches_that_fail_lose_trust_and_only_those_of_their_length():
    """After 1 2, there is always another token; copies of the source are right, and in the end, so are those of 1 2."""
    drafter, trees, trusts = saying(Ngram(), [*SOURCE, 1, 2]), [], []
    text = drafter.rows[0].own.text
    for token in range(200, 250):
        trees.append(tree_of(drafter, floor=0.05).nodes)
        trusts.append(sum(first_level(drafter).values()))
        text += [token, 1, 2]
    assert max(trees[1:4]) > 5
    assert trees[-1] == 1
    assert trusts[-1] < 0.1 < 0.4 < trusts[2]
    text += SOURCE[:30]
    assert tree_of(drafter).max_depth == 16
    for token in range(50):
        text += [token % 40 + 300, 1, 2, 77]
        first_level(drafter)
    text += [99, 1, 2]
    assert first_level(drafter)[77] > 0.9


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([5], SOURCE[11]),  # one token replaced
        ([5, SOURCE[10]], SOURCE[11]),  # one inserted
        ([5, 6, 7, SOURCE[10]], SOURCE[11]),  # three inserted
        ([SOURCE[13]], SOURCE[14]),  # three left out
        ([5, SOURCE[14]], SOURCE[15]),  # four replaced by one
        ([*range(5, 16), SOURCE[10]], SOURCE[11]),  # as many as may be, inserted
        ([SOURCE[26]], SOURCE[27]),  # as many as may be, left out
    ],
)
def test_a_copy_is_resumed_after_a_difference(said, expected):
    prompt = [*SOURCE, 1, 2]
    drafter = saying(Ngram(), prompt, *([token] for token in (*SOURCE[:10], *said)))
    ((token, trust),) = first_level(drafter).items()
    assert token == expected
    assert trust >= 0.4
    (path,) = [path for path in paths(tree_of(drafter)) if len(path) == 4]
    assert path == SOURCE[expected - 100 : expected - 96]
    resumed = saying(Ngram(), prompt, [*SOURCE[:10], *said])  # in one step
    assert first_level(resumed) == pytest.approx(first_level(drafter))
    chance = saying(Ngram(), [*prompt, *said])
    assert first_level(chance).get(expected, 0.0) < 0.13


@pytest.mark.parametrize("said", [[SOURCE[27]], [*range(5, 17), SOURCE[10]]])
def test_a_copy_is_given_up_far_from_its_source(said):
    """After one token more than in the cases above."""
    drafter = saying(Ngram(), [*SOURCE, 1, 2], [*SOURCE[:10], *said])
    # Of one equal token, of which one match has been right.
    assert 0.1 < first_level(drafter)[said[-1] + 1] < 0.23


def test_a_copy_goes_on_where_other_matches_are_more():
    """The source's next tokens occurred in other places since, more often than places are looked at."""
    prompt = [*SOURCE, 1, *[SOURCE[9], 7] * 12]
    drafter = saying(Ngram(), [*prompt, 2], *([token] for token in SOURCE[:10]))
    assert max(first_level(drafter), key=first_level(drafter).get) == SOURCE[10]
    drafter = saying(Ngram(longest=1), [*prompt, 2], *([token] for token in SOURCE[:10]))
    assert max(first_level(drafter), key=first_level(drafter).get) == SOURCE[10]


def test_a_copy_of_an_earlier_request_is_resumed_after_a_difference():
    """At a place beyond the length of the row that copies."""
    drafter, history = saying(Ngram(), SOURCE), [1]
    drafter.select([])
    begun(drafter, [history])
    for token in (*SOURCE[30:40], 5):
        drafter.propose(torch.tensor([history[-1]]), StepPlan(1))
        history.append(token)
    assert first_level(drafter) == {SOURCE[41]: pytest.approx(0.4)}


def test_rows_that_leave_in_the_middle_of_a_batch_are_remembered():
    drafter = Ngram()
    texts = [[*SHORT[:10], 1], [*SHORT[10:20], 2], [*SHORT[20:30], 3]]
    begun(drafter, texts, vocab=VOCAB)
    drafter.propose(torch.tensor([1, 2, 3]), StepPlan(4))
    texts[0] += [SHORT[10], SHORT[11]]
    texts[2] += [SHORT[20], SHORT[21]]
    drafter.select([2, 0])
    assert [row.own.text for row in drafter.rows] == [texts[2], texts[0]]
    tree = drafter.propose(torch.tensor([SHORT[21], SHORT[11]]), StepPlan(4))
    assert paths(tree, 0)[0] == [SHORT[22]]  # of its own text
    assert paths(tree, 1)[0] == [SHORT[12]]  # of the row that has left


def test_long_matches_of_earlier_requests_come_before_chance():
    """As many chance matches in the text as places are looked at."""
    drafter = saying(Ngram(), SOURCE)
    drafter.select([])
    begun(drafter, [[*[SOURCE[9], 7] * 12, *SOURCE[:10]]])
    found = first_level(drafter)
    assert max(found, key=found.get) == SOURCE[10]


def test_copies_do_not_remember_running_requests():
    target, drafter = target_of("llama"), Ngram()
    drafter.attach(target)
    begun(drafter, [SOURCE])
    drafter.select([])
    begun(drafter, [SHORT])
    copied = drafter.fork(target)
    begun(copied, [[1, *SHORT[:3]], [1, *SOURCE[:3]]])
    assert copied.continuations(0, ()) == []
    assert copied.continuations(1, ()) == [(SOURCE[3], pytest.approx(0.45))]
    assert [row.own.text for row in drafter.rows] == [SHORT]
    copied.select([])
    assert drafter._past.text == SOURCE


def test_another_vocabulary_is_forgotten():
    for vocab, known in ((30, True), (31, False)):
        drafter = Ngram()
        begun(drafter, [[5, 6, 7, 8]], vocab=30)
        drafter.select([])
        begun(drafter, [[1, 5, 6]], vocab=vocab)
        assert bool(drafter.continuations(0, ())) == known


def test_an_earlier_request_is_not_hidden_by_a_match_at_its_place():
    drafter = Ngram()
    begun(drafter, [[5, 6, 8]])
    drafter.select([])
    begun(drafter, [[5, 6, 7, 1, 5, 6]])
    assert {token for token, _ in drafter.continuations(0, ())} == {7, 8}
