"""Verification as a walk, against a plain loop, and as a distribution, by frequencies."""

import pytest
import torch
from torch.nn import functional as F

from mmspec import TokenTree, accept_path, verify
from tests.tiny import random_tree, valid_nodes

VOCAB = 5


def walk(tree, row, choices):
    """The rule of verify_greedy as a loop: follow the child that carries the choice."""
    path, tokens = [0], []
    while True:
        wanted = int(choices[row, path[-1]])
        tokens.append(wanted)
        below = [
            i
            for i in valid_nodes(tree, row)
            if i and int(tree.parents[row, i]) == path[-1] and int(tree.tokens[row, i]) == wanted
        ]
        if not below:
            return path, tokens
        path.append(below[0])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("nodes", [1, 2, 7, 63])
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
def test_greedy_equals_a_loop(shape, nodes, batch):
    g = torch.Generator().manual_seed(nodes + batch)
    vocab = max(4, nodes if shape == "star" else 4)
    for _ in range(5):
        tree = random_tree(g, batch, nodes, vocab, shape=shape)
        choices = torch.randint(vocab, (batch, nodes), generator=g)
        # Let most nodes agree with one of their children, so that paths get long.
        for b in range(batch):
            for i in valid_nodes(tree, b)[1:]:
                if torch.rand((), generator=g) < 0.8:
                    choices[b, tree.parents[b, i]] = tree.tokens[b, i]
        verdict = accept_path(tree, choices)
        assert verdict.path.shape == verdict.tokens.shape == (batch, tree.max_depth + 1)
        assert verdict.length.shape == verdict.bonus.shape == (batch,)
        for b in range(batch):
            path, tokens = walk(tree, b, choices)
            assert verdict.path[b].tolist() == path + [-1] * (tree.max_depth + 1 - len(path))
            assert int(verdict.length[b]) == len(path)
            assert int(verdict.bonus[b]) == tokens[-1]
            assert verdict.host[b] == (path, tokens)


def test_padding_is_never_accepted():
    tree = TokenTree(torch.tensor([[3, 7, 7]]), torch.tensor([[-1, 0, 0]]), valid=torch.tensor([[True, False, False]]))
    verdict = accept_path(tree, torch.tensor([[7, 7, 7]]))
    assert verdict.host == [([0], [7])]


def test_shapes_are_checked():
    tree = TokenTree(torch.tensor([[3, 7]]), torch.tensor([[-1, 0]]))
    with pytest.raises(ValueError, match=r"choices must be \(batch, nodes\) = \(1, 2\): got \(1, 3\)"):
        accept_path(tree, torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"probs must be .*\(1, 2\): got \(1, 3, 5\)"):
        verify(tree, torch.ones(1, 3, 5))
    drawn = TokenTree(tree.tokens, tree.parents, draft_probs=torch.ones(1, 2, 6))
    with pytest.raises(ValueError, match=r"draft_probs must have the shape of probs \(1, 2, 5\): got \(1, 2, 6\)"):
        verify(drawn, torch.ones(1, 2, 5))


def target_bigram(seed):
    return (torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)).double() * 1.5).softmax(-1)


TREES = {"two, then one": [[-1, 0, 0, 1]], "three": [[-1, 0, 0, 0]], "chain": [[-1, 0, 1, 2]]}
DRAFTS = {
    "another": target_bigram(52),
    "equal": target_bigram(2),
    "fewer tokens": target_bigram(52) * torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]),
    "fixed": None,
}
"""The drafter's distribution after each token; None for trees that were not drawn."""


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("shape", TREES)
def test_emitted_tokens_have_the_targets_distribution(shape, drafts):
    """40,000 trees, each with its own outcome; chi-square over all triples of first tokens."""
    rows, bigram, q = 40_000, target_bigram(2), DRAFTS[drafts]
    g = torch.Generator().manual_seed(1)
    parents, tokens = torch.tensor(TREES[shape]), torch.zeros(rows, 4, dtype=torch.long)
    if q is None:
        tokens[:, 1:] = torch.tensor([3, 1, 2])
    for node in range(3 if q is not None else 0):
        below = (parents[0] == node).nonzero()[:, 0]
        if len(below):  # without replacement, in draw order
            tokens[:, below] = torch.multinomial(q[tokens[:, node]], len(below), generator=g)
    draft_probs = None if q is None else (q / q.sum(-1, keepdim=True))[tokens]
    trees = TokenTree(tokens, parents.expand_as(tokens), draft_probs=draft_probs, check=False)
    verdict = verify(trees, bigram[tokens], generator=g)
    emitted = F.pad(verdict.tokens, (0, 2))
    said = [emitted[:, 0]]
    for place in (1, 2):  # tokens after the step's follow the target
        later = torch.multinomial(bigram[said[-1]], 1, generator=g)[:, 0]
        said.append(torch.where(verdict.length > place, emitted[:, place], later))
    seen = torch.bincount((said[0] * VOCAB + said[1]) * VOCAB + said[2], minlength=VOCAB**3).double()
    expected = (bigram[0][:, None, None] * bigram[:, :, None] * bigram[None]).flatten() * rows
    few = expected < 5  # together
    seen, expected = (torch.cat([one[~few], one[few].sum()[None]]) for one in (seen, expected))
    chi_square, freedom = float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1
    assert chi_square < freedom + 3.5 * (2 * freedom) ** 0.5, (chi_square, freedom)


def test_a_child_that_the_drafter_could_not_draw_is_never_taken_for_granted():
    # q(x) = 0 and p(x) = 0: neither may divide nor accept.
    q = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    p = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    tree = TokenTree(torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]), draft_probs=q)
    assert verify(tree, p, generator=torch.Generator().manual_seed(0)).host == [([0], [0])]


def test_one_generator_decides_everything():
    g = torch.Generator()
    tree = random_tree(torch.Generator().manual_seed(0), 3, 9, VOCAB)
    probs = target_bigram(4)[tree.tokens]
    first, second, other = (verify(tree, probs, generator=g.manual_seed(s)).tokens for s in (5, 5, 7))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
