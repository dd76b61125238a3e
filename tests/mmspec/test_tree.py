import pytest
import torch

from mmspec import TokenTree
from tests.tiny import random_tree, root_path, valid_nodes


def tree(tokens, parents, **keywords):
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), **keywords)


@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 63])
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
def test_ancestors_and_depth_follow_parents(shape, nodes):
    drafted = random_tree(torch.Generator().manual_seed(nodes), 3, nodes, 90, shape=shape)
    assert drafted.ancestors.shape == (3, nodes, nodes)
    assert drafted.depth.shape == (3, nodes)
    deepest = 0
    for b in range(3):
        for i in range(nodes):
            path = root_path(drafted, b, i)
            assert drafted.ancestors[b, i].nonzero().flatten().tolist() == path
            assert int(drafted.depth[b, i]) == len(path) - 1
            deepest = max(deepest, len(path) - 1)
    assert drafted.max_depth == deepest


@pytest.mark.parametrize("ragged", [False, True])
def test_drafted_leaves_root_and_padding_out(ragged):
    drafted = random_tree(torch.Generator().manual_seed(3), 4, 9, 90, ragged=ragged)
    assert drafted.drafted == [len(valid_nodes(drafted, b)) - 1 for b in range(4)]
    assert (drafted.drafted == [8] * 4) == (not ragged)


def test_root_alone():
    drafted = TokenTree.root(torch.tensor([5, 6]))
    assert (drafted.batch, drafted.nodes, drafted.max_depth) == (2, 1, 0)
    assert drafted.tokens.tolist() == [[5], [6]]
    assert drafted.parents.tolist() == [[-1], [-1]]
    assert drafted.ancestors.all()
    assert drafted.depth.tolist() == [[0], [0]]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        (
            [[1, 2, 3, 4]],
            [[-1, 0, 1, 5]],
            r"^parents must point backwards: parents\[0, 3\] = 5, expected >= 0 and < 3$",
        ),
        ([[1, 2], [1, 2]], [[-1, 0], [-1, 1]], r"parents\[1, 1\] = 1, expected >= 0 and < 1$"),
        ([[1, 2]], [[-1, -1]], r"parents\[0, 1\] = -1, expected >= 0 and < 1$"),
        ([[1, 2]], [[0, 0]], r"parents\[0, 0\] = 0, expected -1$"),
        ([[1, 2]], [[-2, 0]], r"parents\[0, 0\] = -2, expected -1$"),
        ([[1, 7, 7]], [[-1, 0, 0]], r"^siblings must carry different tokens: nodes \[0, 1\] and \[0, 2\] are 7$"),
        ([[1, 7, 7]], [[-1, 0]], r"^parents must have the shape of tokens \(1, 3\): got \(1, 2\)$"),
        ([1, 2], [-1, 0], r"^tokens must be \(batch, nodes\) with at least the root: got shape \(2,\)$"),
        ([[]], [[]], r"at least the root: got shape \(1, 0\)$"),
    ],
)
def test_refuses(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        tree(tokens, parents)


def test_refuses_wrong_masks_and_draft_probs():
    tokens, parents = [[1, 2, 3]], [[-1, 0, 1]]
    with pytest.raises(ValueError, match=r"^the root must be valid in every row$"):
        tree(tokens, parents, valid=torch.tensor([[False, True, True]]))
    with pytest.raises(ValueError, match=r"node \[0, 2\] has the padded parent 1$"):
        tree(tokens, parents, valid=torch.tensor([[True, False, True]]))
    with pytest.raises(ValueError, match=r"^valid must have the shape of tokens \(1, 3\): got \(1, 2\)$"):
        tree(tokens, parents, valid=torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^draft_probs must be \(batch, nodes, vocab\): got \(1, 2, 9\)$"):
        tree(tokens, parents, draft_probs=torch.ones(1, 2, 9))


def test_equal_tokens_are_fine_where_they_cannot_be_confused():
    tree([[1, 7, 7]], [[-1, 0, 1]])  # parent and child
    tree([[1, 7, 8, 9, 9]], [[-1, 0, 0, 1, 2]])  # cousins
    tree([[1, 7, 7]], [[-1, 0, 0]], valid=torch.tensor([[True, True, False]]))  # padding


def test_repr_names_the_sizes():
    assert repr(tree([[1, 2]], [[-1, 0]])) == "TokenTree(batch=1, nodes=2, drawn=False)"
