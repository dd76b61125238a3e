"""The gated linear recurrence over trees in torch, beyond the grid of ``ops_grid``."""

import pytest
import torch

from mmspec.core.tree import TokenTree
from mmspec.ops import kernels
from mmspec.ssm import ops
from mmspec.ssm.ops import reference
from tests.ssm.ops_grid import Allocations, Case, draw, paths_to

CLOSE = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")


def test_nodes_are_computed_alike_one_by_one(monkeypatch):
    """As where shapes are fixed, and the host does not read the tree."""
    i = draw(Case(nodes=20, batch=3))
    expected = ops.tree_lru(*i.lru, i.lru_state, ops.tree_levels(i.tree.ancestors))
    monkeypatch.setattr(kernels, "fixed_shapes", lambda device: True)
    found = ops.tree_lru(*i.lru, i.lru_state, ops.tree_levels(i.tree.ancestors))
    assert torch.equal(found, expected)


def test_commit_at_every_node_is_the_state_there():
    i = draw(Case(batch=1, nodes=12, heads=4, head_dim=5))
    states = ops.tree_lru(*i.lru, i.lru_state, ops.tree_levels(i.tree.ancestors))
    for node in range(12):
        path = paths_to(i.tree.parents, torch.tensor([node]))
        state, expected = i.lru_state, i.lru_state.double()
        ops.commit_lru(*i.lru, state, path)
        reference.commit_lru(*i.lru, expected, path)
        torch.testing.assert_close(state, expected.float(), **CLOSE)
        torch.testing.assert_close(state, states[:, node], **CLOSE)


def test_a_step_without_drafts_after_several_were_accepted():
    """Steps of 4 accepted nodes, of 1 and of 1 end where a chain of 6 does."""
    i = draw(Case("chain", batch=2, nodes=6))
    parents = (torch.arange(6) - 1).expand(2, -1)
    expected = reference.tree_lru(*i.lru, i.lru_state, parents)
    state, found = i.lru_state, []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        inputs = [t[:, first:last] for t in i.lru]
        step = TokenTree(i.tree.tokens[:, first:last], parents[:, : last - first], check=False)
        found.append(ops.tree_lru(*inputs, state, ops.tree_levels(step.ancestors)))
        ops.commit_lru(*inputs, state, torch.arange(last - first).expand(2, -1))
    torch.testing.assert_close(torch.cat(found, 1), expected, **CLOSE)


def test_rows_absorb_paths_of_different_lengths():
    i = draw(Case("chain", batch=4, nodes=5, groups=2))
    path = torch.tensor([[0, 1, 2, 3], [-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1]])
    state, expected = i.lru_state, i.lru_state
    ops.commit_lru(*i.lru, state, path)
    reference.commit_lru(*i.lru, expected, path)
    torch.testing.assert_close(state, expected, **CLOSE)


def test_only_the_outputs_are_of_the_size_of_all_nodes():
    i = draw(Case("chain", batch=1, nodes=63, heads=8, head_dim=64, strided=False))
    inputs, state, levels = i.lru, i.lru_state, ops.tree_levels(i.tree.ancestors)
    with Allocations() as scanned:
        ops.tree_lru(*inputs, state, levels)
    assert [size for size in scanned.sizes if size > state.numel()] == [64 * state.numel()]


def test_wrong_shapes_are_named():
    i = draw(Case())
    x, a = i.lru
    state, levels = i.lru_state, ops.tree_levels(i.tree.ancestors)
    with pytest.raises(ValueError, match=r"state must be \(2, 32\) torch.float32: got \(2, 32\) torch.bfloat16"):
        ops.tree_lru(x, a, state.bfloat16(), levels)
    with pytest.raises(ValueError, match=r"a must be .* \(2, 16, 32\): got \(2, 3, 32\)"):
        ops.commit_lru(x, a[:, :3], state, i.deepest)
    with pytest.raises(ValueError, match="state must be contiguous"):
        ops.commit_lru(x, a, state.t().contiguous().t(), i.deepest)
