"""What a node of a tree has before it, followed on the device while rows grow on the host."""

import pytest
import torch

from mmspec.core.tree import TokenTree
from mmspec.sampling.processors import NOTHING, Histories, NodeHistories
from tests.tiny import random_tree, root_path, valid_nodes


@pytest.mark.parametrize("batch", [1, 3])
def test_nodes_see_their_rows_as_they_grow(batch):
    """Rows grow unevenly, one of them not at all from some step on."""
    g = torch.Generator().manual_seed(batch)
    number = lambda most: int(torch.randint(most, (1,), generator=g))  # noqa: E731
    rows, followed = [[number(50) for _ in range(1 + 3 * b)] for b in range(batch)], Histories()
    for step in range(12):
        tree = random_tree(g, batch, 1 + number(9), 50)
        tokens = torch.cat([torch.tensor([[row[-1]] for row in rows]), tree.tokens[:, 1:]], dim=1)
        tree = TokenTree(tokens, tree.parents, tree.valid, check=False)
        seen = NodeHistories(followed, rows, tree, range(batch))
        assert seen.prefix.tolist() == [[NOTHING] * (max(map(len, rows)) - len(row)) + row for row in rows]
        for b, row in enumerate(rows):
            for node in valid_nodes(tree, b):
                expected = row + [int(tokens[b, i]) for i in root_path(tree, b, node)[1:]]
                assert [token for token in seen.whole[b, node].tolist() if token != NOTHING] == expected
                assert int(seen.lengths[b, node]) == len(expected)
                for count in (0, 1, 3, len(expected) + 2):
                    last = [NOTHING] * max(0, count - len(expected)) + expected[max(0, len(expected) - count) :]
                    assert seen.last(count)[b, node].tolist() == last
        for b, row in enumerate(rows):
            row += [number(50) for _ in range(number(4) if b or step < 6 else 0)]
