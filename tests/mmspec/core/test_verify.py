"""Verification as a walk (against a plain loop) and as a distribution (by exact enumeration).

The distribution is enumerated without trusting the code under test: its draws are replaced by prescribed ones. Where a
random number decides about acceptance, the threshold is found by bisection on that number; where a token is drawn, the
distribution that it would be drawn from is recorded. The weights of all outcomes then add up to the distribution of the
emitted tokens, which must be the target's own.
"""

import itertools
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch

from mmspec import TokenTree, accept_path, ops, verify
from tests.tiny import random_tree, valid_nodes

module = import_module("mmspec.core.verify")
VOCAB = 5
UNDECIDED = -2


# ---------------------------------------------------------------------- the walk


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


# ---------------------------------------------------------------------- the distribution


@contextmanager
def prescribed(tree, chances, drawn_from):
    """Replace randomness: ``chances[r]`` decides about a node's r-th child; draws are recorded, left undecided."""

    def uniforms(shape, like, generator):
        numbers = torch.zeros(tree.tokens.shape, dtype=like.dtype)
        if len(shape) == 2:  # no child is tried
            return numbers
        for b, parents in enumerate(tree.parents.tolist()):
            for i, parent in enumerate(parents[1:], start=1):
                numbers[b, i] = chances[parents[1:i].count(parent)][b, parent]
        return torch.stack([numbers, torch.zeros_like(numbers)])

    def quantile(probs, uniform):
        drawn_from.append(probs / probs.sum(-1, keepdim=True))
        return torch.full(probs.shape[:-1], UNDECIDED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_uniforms", uniforms)
        for place in (import_module("mmspec.ops.verify"), module.ops):
            patch.setattr(place, "quantile", quantile)
        yield


def choices_of(verifier, tree, probs, chances):
    """Token that the verifier chooses after each node, (batch, nodes), and the distribution at undecided nodes."""
    seen, drawn_from = [], []
    with prescribed(tree, chances, drawn_from), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "accept_path", lambda _, choices: seen.append(choices))
        verifier(tree, probs)
    return seen[0], drawn_from[0]


def choice_distribution(verifier, tree, probs):
    """(batch, nodes, vocab): how probable each token is to be put after each node, for the trees as they are."""
    batch, nodes, _ = probs.shape
    ranks = 0
    if tree.draft_probs is not None:
        counts = (tree.parents[:, :, None] == torch.arange(nodes)).sum(1)
        ranks = int(counts.max())
    # An infinite number accepts nothing, so every acceptance happens at the tested rank.
    chances = [torch.full((batch, nodes), torch.inf, dtype=probs.dtype) for _ in range(max(ranks, 1))]
    total = torch.zeros_like(probs)
    left = torch.ones(batch, nodes, dtype=probs.dtype)
    for rank in range(ranks):
        low, high = torch.zeros_like(left), torch.ones_like(left)
        accepted_token = torch.full((batch, nodes), UNDECIDED)
        for _ in range(40):
            middle = (low + high) / 2
            trial = [*chances[:rank], middle, *chances[rank + 1 :]]
            choices, _ = choices_of(verifier, tree, probs, trial)
            accepted = choices != UNDECIDED
            accepted_token = torch.where(accepted, choices, accepted_token)
            low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
        # A threshold of one means: accepted whatever the number; of zero: never, or no such child.
        threshold = torch.where(accepted_token == UNDECIDED, 0.0, (low + high) / 2)
        total.scatter_add_(-1, accepted_token.clamp(min=0)[..., None], (left * threshold)[..., None])
        left = left * (1 - threshold)
    _, residual = choices_of(verifier, tree, probs, chances)
    return total + left[..., None] * residual


def emitted_distribution(verifier, trees, weights, bigram):
    """(vocab,) * 3: the probability of the next three tokens, tokens after the step's tokens follow the target.

    Args:
        trees: a batch of trees with one root token, every way in which the draft may turn out.
        weights: (batch,) the probability of each.
        bigram: (vocab, vocab) the target's distribution after each token.
    """
    vocab = bigram.shape[0]
    per_node = choice_distribution(verifier, trees, bigram[trees.tokens])
    result = torch.zeros(vocab, vocab, vocab, dtype=bigram.dtype)
    combinations = torch.tensor(list(itertools.product(range(vocab), repeat=trees.nodes)))
    for row in range(trees.batch):
        weight = weights[row] * per_node[row, torch.arange(trees.nodes), combinations].prod(-1)
        many = TokenTree(
            trees.tokens[row].expand(len(combinations), -1),
            trees.parents[row].expand(len(combinations), -1),
            check=False,
        )
        verdict = accept_path(many, combinations)
        for w, (_, tokens) in zip(weight, verdict.host, strict=True):
            tail = w * _chain_rule(bigram, tokens[-1], 3 - len(tokens))
            result[tuple(tokens[:3])] += tail
    return result


def _chain_rule(bigram, last, count):
    if count <= 0:
        return torch.ones((), dtype=bigram.dtype)
    first = bigram[last]
    return first if count == 1 else first[:, None] * bigram


def truth(bigram, root):
    return bigram[root][:, None, None] * bigram[:, :, None] * bigram[None]


def target_bigram(seed, vocab=VOCAB):
    return (torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)).double() * 1.5).softmax(-1)


@pytest.mark.parametrize("seed", range(6))
def test_fixed_trees_emit_the_targets_distribution(seed):
    g = torch.Generator().manual_seed(seed)
    shape = ["random", "random", "chain", "star", "random", "random"][seed]
    nodes = [4, 4, 3, 4, 1, 2][seed]
    tree = random_tree(g, 1, nodes, VOCAB, ragged=False, shape=shape)
    bigram = target_bigram(seed)
    emitted = emitted_distribution(verify, tree, torch.ones(1).double(), bigram)
    torch.testing.assert_close(emitted, truth(bigram, int(tree.tokens[0, 0])))


def drawn_trees(q, root=0):
    """Every outcome of drawing root -> (a, b) and a -> c without replacement, with its probability.

    ``q``: (vocab, vocab), the drafter's distribution after each token.
    """
    tokens, weights = [], []
    for a, b, c in itertools.product(range(q.shape[0]), repeat=3):
        if a != b:
            tokens.append([root, a, b, c])
            weights.append(q[root, a] * q[root, b] / (1 - q[root, a]) * q[a, c])
    drawn = torch.tensor(tokens)
    parents = torch.tensor([[-1, 0, 0, 1]]).expand_as(drawn)
    return TokenTree(drawn, parents, draft_probs=q[drawn]), torch.stack(weights)


@pytest.mark.parametrize("seed", [0, 3])
def test_drawn_trees_emit_the_targets_distribution(seed):
    bigram, q = target_bigram(seed), target_bigram(seed + 50)
    if seed == 3:  # drafter and target agree exactly, and where they do not, supports differ
        q = bigram.clone()
        q[0] = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]).double()
        q[0] += 1e-9
        q[0] /= q[0].sum()
    trees, weights = drawn_trees(q)
    assert float(weights.sum()) == pytest.approx(1.0)
    emitted = emitted_distribution(verify, trees, weights, bigram)
    torch.testing.assert_close(emitted, truth(bigram, 0), atol=1e-7, rtol=1e-5)


def test_every_drawn_sibling_is_tried_in_turn():
    """p = (0, 0.6, 0.4), q = (0.5, 0.5, 0): the first child is rejected and leaves p = (0, 0.2, 0.8), q = (0, 1, 0)."""
    q, p = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.6, 0.4])
    tree = TokenTree(torch.tensor([[0, 0, 1]]), torch.tensor([[-1, 0, 0]]), draft_probs=q.expand(1, 3, -1))
    for chance, last in itertools.product((0.19, 0.21), (0.1, 0.9)):
        chances = torch.tensor([[0.0, 0.0, chance]])
        choice = ops.choose_drawn(tree, p.expand(1, 3, -1), chances, torch.full((1, 3), last))
        # A second rejection leaves p = norm(max(p - q, 0)) = (0, 0, 1).
        assert int(choice[0, 0]) == (1 if chance < 0.2 else 2)


def test_three_drawn_siblings_leave_each_nodes_distribution_unchanged():
    p, q = target_bigram(1, 6)[0], target_bigram(9, 6)[0]
    tokens, weights = [], []
    for picked in itertools.permutations(range(6), 3):
        weight, rest = 1.0, 1.0
        for token in picked:
            weight, rest = weight * float(q[token]) / rest, rest - float(q[token])
        tokens.append([0, *picked])
        weights.append(weight)
    drawn = torch.tensor(tokens)
    trees = TokenTree(
        drawn, torch.tensor([[-1, 0, 0, 0]]).expand_as(drawn), draft_probs=q.expand(len(tokens), 4, 6).contiguous()
    )
    chosen = choice_distribution(verify, trees, p.expand(len(tokens), 4, 6).contiguous())[:, 0]
    torch.testing.assert_close((torch.tensor(weights).double()[:, None] * chosen).sum(0), p, atol=1e-7, rtol=1e-5)


def test_a_child_that_the_drafter_could_not_draw_is_never_taken_for_granted():
    # q(x) = 0 and p(x) = 0: neither may divide nor accept.
    q = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    p = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    tree = TokenTree(torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]), draft_probs=q)
    assert verify(tree, p, generator=torch.Generator().manual_seed(0)).host == [([0], [0])]


# ---------------------------------------------------------------------- the real randomness


@pytest.mark.parametrize("drawn", [False, True])
def test_frequencies_of_real_draws(drawn):
    """Nothing replaced: 40,000 trees, each row with its own outcome; chi-square over all pairs of first tokens."""
    rows, bigram, q = 40_000, target_bigram(2), target_bigram(52)
    g = torch.Generator().manual_seed(1)
    first = torch.multinomial(q[0].expand(rows, -1), 2, generator=g)  # without replacement, in draw order
    below = torch.multinomial(q[first[:, 0]], 1, generator=g)
    tokens = torch.cat([torch.zeros_like(below), first, below], dim=1)
    if not drawn:
        tokens[:] = torch.tensor([0, 3, 1, 2])
    trees = TokenTree(tokens, torch.tensor([[-1, 0, 0, 1]]).expand_as(tokens), draft_probs=q[tokens] if drawn else None)
    verdict = verify(trees, bigram[tokens], generator=g)
    last = torch.where(verdict.length > 1, verdict.tokens[:, 1], -1)
    missing = torch.multinomial(bigram[verdict.tokens[:, 0]], 1, generator=g)[:, 0]
    second = torch.where(last >= 0, last, missing)
    seen = torch.bincount(verdict.tokens[:, 0] * VOCAB + second, minlength=VOCAB**2).double()
    expected = (bigram[0][:, None] * bigram).flatten() * rows
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 51.2  # 24 degrees of freedom, p = 0.001


def test_one_generator_decides_everything():
    g = torch.Generator()
    tree = random_tree(torch.Generator().manual_seed(0), 3, 9, VOCAB)
    probs = target_bigram(4)[tree.tokens]
    first, second, other = (verify(tree, probs, generator=g.manual_seed(s)).tokens for s in (5, 5, 7))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
