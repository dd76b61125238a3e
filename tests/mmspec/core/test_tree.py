import pytest
import torch

from mmspec import TokenTree
from mmspec.core.tree import best_chains, build_tree, merge
from mmspec.ops import kernels
from tests.tiny import random_tree, root_path, valid_nodes


def tree(tokens, parents, **keywords):
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), **keywords)


CHAIN, BELOW = [[1, 2, 3]], [[-1, 0, 1]]


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


@pytest.mark.parametrize(
    ("tokens", "parents", "more", "message"),
    [
        (
            [[1, 2, 3, 4]],
            [[-1, 0, 1, 5]],
            {},
            r"^parents must point backwards: parents\[0, 3\] = 5, expected >= 0 and < 3$",
        ),
        ([[1, 2], [1, 2]], [[-1, 0], [-1, 1]], {}, r"parents\[1, 1\] = 1, expected >= 0 and < 1$"),
        ([[1, 2]], [[-1, -1]], {}, r"parents\[0, 1\] = -1, expected >= 0 and < 1$"),
        ([[1, 2]], [[0, 0]], {}, r"parents\[0, 0\] = 0, expected -1$"),
        ([[1, 2]], [[-2, 0]], {}, r"parents\[0, 0\] = -2, expected -1$"),
        ([[1, 7, 7]], [[-1, 0, 0]], {}, r"^siblings must have different tokens: nodes \[0, 1\] and \[0, 2\] are 7$"),
        ([[1, 7, 7]], [[-1, 0]], {}, r"^parents must have the shape of tokens \(1, 3\): got \(1, 2\)$"),
        ([1, 2], [-1, 0], {}, r"^tokens must be \(batch, nodes\) with at least the root: got shape \(2,\)$"),
        ([[]], [[]], {}, r"at least the root: got shape \(1, 0\)$"),
        (CHAIN, BELOW, {"valid": [[False, True, True]]}, r"^the root must be valid in every row$"),
        (CHAIN, BELOW, {"valid": [[True, False, True]]}, r"node \[0, 2\] has the padded parent 1$"),
        (CHAIN, BELOW, {"valid": [[True, True]]}, r"^valid must have the shape of tokens \(1, 3\): got \(1, 2\)$"),
        (CHAIN, BELOW, {"draft_probs": [[[1.0] * 9] * 2]}, r"^draft_probs must be .*vocab\): got \(1, 2, 9\)$"),
        (CHAIN, BELOW, {"log_probs": [[0.0, 0.5, -1.0]]}, r"^log_probs must be at most 0: got 0.5$"),
    ],
)
def test_refuses(tokens, parents, more, message):
    with pytest.raises(ValueError, match=message):
        tree(tokens, parents, **{name: torch.tensor(values) for name, values in more.items()})


def test_equal_tokens_are_fine_where_they_cannot_be_confused():
    tree([[1, 7, 7]], [[-1, 0, 1]])  # parent and child
    tree([[1, 7, 8, 9, 9]], [[-1, 0, 0, 1, 2]])  # cousins
    tree([[1, 7, 7]], [[-1, 0, 0]], valid=torch.tensor([[True, True, False]]))  # padding


def test_repr_names_the_sizes():
    assert repr(tree([[1, 2]], [[-1, 0]])) == "TokenTree(batch=1, nodes=2, drawn=False)"


def scored(seed, batch, nodes, vocab=3, root=0):
    """A ragged random tree whose nodes are listed likeliest first, with the probabilities of its paths."""
    generator = torch.Generator().manual_seed(seed)
    drafted = random_tree(generator, batch, nodes, vocab)
    drafted.tokens[:, 0] = root
    shares = torch.rand(batch, nodes, generator=generator) * 0.9 + 0.05
    scores = torch.zeros(batch, nodes)
    for i in range(1, nodes):
        above = drafted.parents[:, i].clamp(min=0)
        scores[:, i] = scores.gather(1, above[:, None])[:, 0] + shares[:, i].log()
    alive = torch.ones(batch, nodes, dtype=torch.bool) if drafted.valid is None else drafted.valid
    scores, order = scores.masked_fill(~alive, -torch.inf).sort(dim=1, descending=True, stable=True)
    place = order.argsort(1)
    parents = place.gather(1, drafted.parents.gather(1, order).clamp(min=0)).where(alive.gather(1, order), 0)
    parents[:, 0] = -1
    tokens = drafted.tokens.gather(1, order)
    return TokenTree(tokens, parents, alive.gather(1, order), log_probs=scores)


def scored_paths(tree, row):
    """Token path -> probability of every drafted node."""
    nodes = valid_nodes(tree, row)[1:]
    keys = [tuple(int(tree.tokens[row, i]) for i in root_path(tree, row, node)) for node in nodes]
    assert len(set(keys)) == len(keys)
    return {key: float(tree.log_probs[row, node].exp()) for key, node in zip(keys, nodes, strict=True)}


@pytest.mark.parametrize("fixed", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", [(1, 6), (7, 1), (2, 2), (9, 14), (12, 5, 8)])
def test_merged_trees_hold_every_path_once(seed, sizes, fixed, monkeypatch):
    """Against dictionaries of paths; three tokens, so that many paths are shared."""
    monkeypatch.setattr(kernels, "static_shapes", lambda device: fixed)
    trees = [scored(seed * 10 + number, 3, nodes) for number, nodes in enumerate(sizes)]
    merged = merge(trees)
    TokenTree(merged.tokens, merged.parents, merged.valid, log_probs=merged.log_probs)  # validates
    for b in range(3):
        union: dict[tuple[int, ...], float] = {}
        for other in trees:
            for path, p in scored_paths(other, b).items():
                union[path] = max(p, union.get(path, 0.0))
        assert scored_paths(merged, b) == pytest.approx(union)
        assert merged.path_probs[b] == sorted(merged.path_probs[b], reverse=True)
        assert merged.drafted[b] == len(union) == len(merged.path_probs[b])
    assert fixed or 1 in sizes or merged.nodes == 1 + max(merged.drafted)
    depth = int(TokenTree(merged.tokens, merged.parents, check=False).depth.max())
    assert merged.max_depth >= depth if fixed else merged.max_depth == depth


@pytest.mark.parametrize("nodes", [1, 2, 5, 11, 40])
def test_the_first_nodes_form_a_tree(nodes):
    whole = scored(3, 4, 12)
    assert whole.drafted == [len(valid_nodes(whole, b)) - 1 for b in range(4)]
    expected = [row[: nodes - 1] for row in whole.path_probs]
    pruned = whole.first(nodes)
    assert torch.equal(pruned.tokens[:, 0], whole.tokens[:, 0])
    assert nodes == 1 or pruned.path_probs == expected
    TokenTree(pruned.tokens, pruned.parents, pruned.valid)  # validates
    for b in range(4):
        likeliest = sorted(scored_paths(whole, b).items(), key=lambda item: -item[1])[: nodes - 1]
        assert nodes == 1 or scored_paths(pruned, b) == pytest.approx(dict(likeliest))
        assert pruned.drafted[b] == min(nodes - 1, whole.drafted[b])
    assert pruned.max_depth == int(TokenTree(pruned.tokens, pruned.parents, check=False).depth.max())


OPERATIONS = {
    "select": lambda tree: tree.select([2, 0]),
    "without": lambda tree: tree.without([1]),
    "without all": lambda tree: tree.without([0, 1, 2]),
    "root": lambda tree: tree.first(1),
    "first": lambda tree: tree.first(4),
    "first without": lambda tree: tree.without([0, 1]).first(4),
    "chain": TokenTree.best_chain,
    "chain without": lambda tree: tree.without([0]).best_chain(),
    "chain without all": lambda tree: tree.without([0, 1, 2]).best_chain(),
    "merge": lambda tree: merge([tree, tree.without([0]), TokenTree.root(tree.tokens[:, 0])]),
    "merge without all": lambda tree: merge([tree.without([0, 1, 2]).best_chain(), tree.first(1)]),
}


@pytest.mark.parametrize("fixed", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", ["scored", "unknown", "drawn", "root"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_what_trees_have(name, kind, fixed, monkeypatch):
    """Probabilities of paths, and the distributions that children were drawn from; a root alone has no paths."""
    monkeypatch.setattr(kernels, "static_shapes", lambda device: fixed)
    whole = scored(7, 3, 9, vocab=4)
    known = _rounded_paths(whole)
    if kind == "root":
        whole = whole.first(1)
    elif kind != "scored":
        if "chain" in name or "merge" in name:
            return  # of trees that can be pruned
        whole.log_probs = None
        whole.draft_probs = torch.rand(3, 9, 4).softmax(-1) if kind == "drawn" else None
    tree = OPERATIONS[name](whole)
    TokenTree(tree.tokens, tree.parents, tree.valid, tree.draft_probs, log_probs=tree.log_probs)  # validates
    assert tree.prunable == (kind == "scored" and tree.nodes > 1)
    assert tree.nodes == 1 or (tree.draft_probs is not None) == (kind == "drawn")
    nodes = [len(valid_nodes(tree, b)) - 1 for b in range(tree.batch)]
    assert tree.drafted == nodes
    if kind == "scored" or tree.nodes == 1:
        assert [len(row) for row in tree.path_probs] == nodes
        assert sum(nodes) == 0 or _rounded_paths(tree) <= known
    assert (sum(nodes) == 0) == (kind == "root" or name == "root" or "all" in name)


def _rounded_paths(tree):
    return {(path, round(p, 4)) for b in range(tree.batch) for path, p in scored_paths(tree, b).items()}


def test_a_root_alone_adds_nothing():
    whole, root = scored(5, 2, 6), TokenTree.root(torch.tensor([0, 0]))
    assert merge([whole, root]) is merge([root, whole]) is merge([whole]) is whole
    assert merge([root, root]).nodes == 1


def test_what_cannot_be_merged_is_refused():
    fine, plain = scored(0, 2, 4), random_tree(torch.Generator().manual_seed(0), 2, 4, 9)
    with pytest.raises(ValueError, match=r"^merge requires at least one tree: got none$"):
        merge([])
    with pytest.raises(ValueError, match=r"must have log_probs and no draft_probs: trees\[1\] has no log_probs$"):
        merge([fine, plain])
    plain.draft_probs = torch.ones(2, 4, 9) / 9
    with pytest.raises(ValueError, match=r"trees\[0\] has draft_probs$"):
        merge([plain, fine])
    with pytest.raises(ValueError, match=r"one batch size: got 2 and 3$"):
        merge([fine, scored(0, 3, 4)])


def test_each_row_gets_the_chain_of_most_expected_tokens():
    """Not the longer path, nor the path of the most probable first token; one of three rows has no drafts."""
    long, short, nothing = (
        build_tree(torch.tensor([1, 2, 3]), [(tokens, [0, 1, 2][: len(tokens)]) for tokens in rows], probs)
        for rows, probs in (
            (([4, 5, 6], [4, 5, 6], []), ([0.5, 0.5, 0.5], [0.8, 0.1, 0.1], [])),
            (([7, 8], [7, 8], [7]), ([0.6, 0.6], [0.7, 0.6], [0.1])),
            (([], [], []), ([], [], [])),
        )
    )
    tree = best_chains([nothing, long, short])
    tree.check_values()
    chains = [[int(tree.tokens[row, node]) for node in valid_nodes(tree, row)] for row in range(3)]
    assert chains == [[1, 4, 5, 6], [2, 7, 8], [3, 7]]
    assert tree.path_probs == [pytest.approx(row) for row in ([0.5, 0.5, 0.5], [0.7, 0.6], [0.1])]
    assert best_chains([nothing, nothing]) is nothing
