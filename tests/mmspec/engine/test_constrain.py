"""Draft trees fitted to grammars, against paths of a list of words; and tokens after them as a distribution."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("llguidance")

from mmspec import SamplingParams, TokenTree
from mmspec.core.plan import StepPlan
from mmspec.core.tree import build_tree
from mmspec.engine.constrain import constrain
from mmspec.sampling.batch_sampler import BatchSampler
from mmspec.sampling.grammar import Grammars
from mmspec.sampling.sampler import Sampler, SamplingState
from tests.mmspec.sampling.plain import chi_square
from tests.tiny import byte_tokenizer

EOS, VOCAB = 2, 259
WORDS = ("abc", "abd", "abdde", "bbbbb", "c", "ca")


def ids_of(text):
    return tuple(byte_tokenizer()(text)["input_ids"])


SPELT = [ids_of(word) for word in WORDS]
PARAMS = SamplingParams(regex="|".join(WORDS))


def grammar():
    return Grammars(byte_tokenizer(), [EOS]).compile(*PARAMS.constraint)


def row(said="", constrained=True):
    sampled = SamplingState([9], Sampler(constraint=grammar() if constrained else None))
    sampled.history.extend(ids_of(said))
    return sampled


def paths_of(tree, place):
    """Paths of drafted nodes, and their probabilities."""
    found, probs = [], {}
    for node in range(1, 1 + tree.drafted[place]):
        path, at = (), node
        while at:
            path, at = (int(tree.tokens[place, at]), *path), int(tree.parents[place, at])
        found.append(path)
        probs[path] = float(tree.log_probs[place, node].exp()) if tree.log_probs is not None else None
    assert len(set(found)) == len(found)
    return probs


def after(said):
    return {word[len(said)] for word in SPELT if word[: len(said)] == said and len(word) > len(said)}


def fitted(said, path):
    """Paths that the fitted tree must contain because the draft contains ``path``."""
    kept, here = [], ids_of(said)
    for token in path:
        following = after(here)
        if token not in following:
            break
        here += (token,)
        kept.append(here[len(ids_of(said)) :])
    while len(following := after(here)) == 1 and here not in SPELT:
        here += (following.pop(),)
        kept.append(here[len(ids_of(said)) :])
    return kept


@pytest.mark.parametrize("said", ["", "a", "ab", "abd", "b", "c", "ca"])
@pytest.mark.parametrize("seed", range(4))
def test_trees_contain_what_the_grammar_allows(said, seed):
    g = torch.Generator().manual_seed(seed)
    letters = [*ids_of("abcde"), EOS]
    nodes, tree_paths = [((), -1)], {(): 0}
    for _ in range(14):
        above = nodes[int(torch.randint(len(nodes), (1,), generator=g))][0]
        path = (*above, letters[int(torch.randint(len(letters), (1,), generator=g))])
        if path not in tree_paths:
            tree_paths[path] = len(nodes)
            nodes.append((path, tree_paths[above]))
    tokens, parents = [path[-1] for path, _ in nodes[1:]], [parent for _, parent in nodes[1:]]
    tree = build_tree(torch.tensor([9]), [(tokens, parents)])
    result = constrain([row(said)], tree, StepPlan(nodes=64, depth=12))
    expected = {one for path in tree_paths for one in fitted(said, path)}
    assert set(paths_of(result, 0)) == expected
    TokenTree(result.tokens, result.parents, result.valid)  # validates


def test_probabilities():
    """Siblings of forbidden drafts take their share; forced tokens are certain; the order is by probability."""
    a, b, c, x = (ids_of(letter)[0] for letter in "abcx")
    #        x 0.5, a 0.2, c 0.1; below a: b 0.15; below x: a
    tree = build_tree(torch.tensor([9]), [([x, a, b, c, a], [0, 0, 2, 0, 1])], [[0.5, 0.2, 0.15, 0.1, 0.05]])
    result = constrain([row()], tree, StepPlan(nodes=64, depth=12))
    assert paths_of(result, 0) == pytest.approx({(a,): 0.4, (a, b): 0.4, (c,): 0.2})
    assert result.path_probs[0] == sorted(result.path_probs[0], reverse=True)
    # After "b", four more are forced, which the draft does not contain.
    result = constrain([row("b")], TokenTree.root(torch.tensor([b])), StepPlan(nodes=64, depth=12))
    assert paths_of(result, 0) == {(b,) * n: 1.0 for n in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("nodes", "depth", "adaptive", "expected"),
    [(3, 12, False, 3), (64, 2, False, 2), (0, 12, False, 0), (64, 0, False, 0), (0, 12, True, 4), (0, 3, True, 3)],
)
def test_forced_tokens_keep_to_the_plan(nodes, depth, adaptive, expected):
    plan = StepPlan(nodes, depth, adaptive=adaptive)
    result = constrain([row("b")], TokenTree.root(torch.tensor([9])), plan)
    assert result.nodes == 1 + expected


def test_a_branch_does_not_escape_through_another():
    a, b, c, e = (ids_of(letter)[0] for letter in "abce")
    tree = build_tree(torch.tensor([9]), [([a, b, c, c, c, EOS, c], [0, 0, 1, 2, 0, 5, 6])])
    result = constrain([row()], tree, StepPlan(nodes=64, depth=12))
    assert set(paths_of(result, 0)) == {(a,), (a, b), (b,), *((b,) * n for n in (2, 3, 4, 5)), (c,)}
    assert e not in result.tokens


def test_trees_that_are_left_alone():
    tree = build_tree(torch.tensor([9]), [([4, 5], [0, 1])], [[0.5, 0.4]])
    assert constrain([row(constrained=False)], tree, StepPlan()) is tree
    drawn = TokenTree(tree.tokens, tree.parents, draft_probs=torch.full((1, 3, VOCAB), 1 / VOCAB))
    assert constrain([row()], drawn, StepPlan()) is drawn


def test_a_drafter_proposes_again_where_all_drafts_were_cut_and_not_at_leaves():
    (c, x), asked = ids_of("cx"), []
    again = SimpleNamespace(continuations=lambda row, path: asked.append((row, path)) or {c: 0.5, x: 0.1}.items())
    tree = build_tree(torch.tensor([9, 9]), [([c], [0]), ([x], [0])], [[0.4], [0.4]])
    result = constrain([row(), row()], tree, StepPlan(nodes=64, depth=12), again)
    assert [paths_of(result, place) for place in (0, 1)] == [{(c,): pytest.approx(p)} for p in (0.4, 0.5 / 0.9)]
    assert asked == [(1, ()), (1, (c,))]


def test_rows_without_a_grammar_keep_their_drafts():
    a, x = ids_of("a")[0], ids_of("x")[0]
    drafts = ([x, a, x], [0, 0, 1])
    for probs in ([[0.5, 0.3, 0.2]] * 2, None):
        tree = build_tree(torch.tensor([9, 9]), [drafts, drafts], probs)
        result = constrain([row(constrained=False), row()], tree, StepPlan(nodes=64, depth=12))
        assert set(paths_of(result, 0)) == set(paths_of(tree, 0))
        assert set(paths_of(result, 1)) == {(a,), (a, ids_of("b")[0])}
        if probs:
            assert paths_of(result, 0) == pytest.approx(paths_of(tree, 0))
            assert result.prunable


def test_drawn_trees_under_a_grammar():
    """Drafts drawn from a distribution that ignores the grammar: the token follows the masked target."""
    total, letters = 1000, [*ids_of("abcd"), EOS]
    g = torch.Generator().manual_seed(0)
    logits = torch.full((VOCAB,), -4.0).index_put((torch.tensor(letters),), torch.tensor([0.3, 1.0, 0.2, 1.5, 0.4]))
    q = torch.zeros(VOCAB).index_put((torch.tensor(letters),), torch.tensor([0.1, 0.2, 0.15, 0.4, 0.15]))
    children = torch.stack([torch.multinomial(q, 3, generator=g) for _ in range(total)])
    tree = TokenTree(
        torch.cat([torch.full((total, 1), 9), children], dim=1),
        torch.tensor([-1, 0, 0, 0]).expand(total, 4),
        draft_probs=q.expand(total, 4, VOCAB),
    )
    sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(1), constraint=grammar())
    rows = [SamplingState([9], sampler) for _ in range(total)]
    choices = BatchSampler().choose(rows, tree, logits.expand(total, 4, VOCAB))
    allowed = sorted(after(()))
    expected = dict(zip(allowed, logits[allowed].softmax(-1).tolist(), strict=True))
    found, limit = chi_square(Counter(choices.tokens[:, 0].tolist()), expected, total)
    assert found < limit
    assert not any(choices.failures)
