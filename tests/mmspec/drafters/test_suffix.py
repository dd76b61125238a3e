"""The suffix drafter's automaton against plain search."""

import random

import pytest
import torch

from mmspec.core.budget import Budget
from mmspec.drafters.suffix import Automaton, Suffix


def occurrences(text, wanted):
    """Places in a text after each occurrence of a sequence of tokens."""
    return [end for end in range(len(wanted), len(text) + 1) if text[end - len(wanted) : end] == wanted]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_and_what_followed_it(seed):
    rnd = random.Random(seed)
    automaton, text = Automaton(), []
    for _ in range(40):
        text.append(rnd.randrange(3))
        automaton.append(text[-1])
        lengths = [n for n in range(len(text) - 1, 0, -1) if len(occurrences(text, text[-n:])) > 1]
        state = automaton.link[automaton.last]
        if not lengths:
            assert state == 0
            continue
        ends = occurrences(text, text[-lengths[0] :])
        followed = {token: sum(text[end : end + 1] == [token] for end in ends) for token in range(3)}
        found = {token: automaton.count[at] for token, at in automaton.next[state].items()}
        assert found == {token: count for token, count in followed.items() if count}


def test_longer_matches_decide():
    """After 1 2 3, 4 is likelier than 5, which followed 3 more often."""
    drafter = Suffix()
    drafter.begin(None, None, [[1, 2, 3, 4, 9, 3, 5, 8, 3, 5, 7, 1, 2, 3]])
    tree = drafter.propose(torch.tensor([3]), Budget(nodes=2, depth=1))
    assert tree.tokens.tolist() == [[3, 4, 5]]
    # Once after 1 2 3, which leaves a third to the shorter 3: once and twice there.
    assert tree.path_probs == [[pytest.approx(2 / 3 + 1 / 3 * 1 / 3.5), pytest.approx(1 / 3 * 2 / 3.5)]]
    assert drafter.continuations(0, ()) == drafter.continuations(0, ())
    assert dict(drafter.continuations(0, (4,))) == {9: pytest.approx(1 / 1.5)}
    drafter.draft_chains(5)
    assert drafter.propose(torch.tensor([3]), Budget(nodes=4, depth=4)).tokens[0, :4].tolist() == [3, 4, 9, 3]


def test_texts_that_repeat_themselves_take_linear_time():
    automaton = Automaton()
    for _ in range(20_000):
        automaton.append(7)
    assert [token for token, *_ in automaton.children(automaton.link[automaton.last])] == [7]
