"""Gated delta rules over trees in torch, of Gated DeltaNet and KDA, beyond the grid of ``ops_grid``."""

import pytest
import torch

from mmspec.core.tree import TokenTree
from mmspec.ops import kernels
from mmspec.ssm import ops
from mmspec.ssm.ops import reference
from mmspec.ssm.ops.kda import _lineages
from tests.ssm.ops_grid import Allocations, Case, check_kda, draw, paths_to

CLOSE = dict(rtol=1e-5, atol=1e-5)
RULES = {
    "delta": (ops.tree_delta, ops.commit_delta, lambda i: i.delta),
    "kda": (ops.tree_kda, ops.commit_kda, lambda i: i.kda),
}


@pytest.fixture(params=RULES)
def rule(request):
    """The operations, and a function from drawn inputs to their q, k, v, g and beta."""
    return RULES[request.param]


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")


def test_commit_at_every_node_of_a_tree(rule):
    _, commit, inputs = rule
    i = draw(Case(batch=1, nodes=12, heads=4, groups=2, head_dim=20, state=12))
    for node in range(12):
        path = paths_to(i.tree.parents, torch.tensor([node]))
        state, expected = i.delta_state, i.delta_state.double()
        commit(*inputs(i)[1:], state, path)
        reference.commit_delta(*inputs(i)[1:], expected, path)
        torch.testing.assert_close(state, expected.float(), **CLOSE)


def test_a_step_without_drafts_after_several_were_accepted(rule):
    """Steps of 4 accepted nodes, of 1 and of 1 end where a chain of 6 does."""
    tree, commit, inputs = rule
    i = draw(Case("chain", batch=2, nodes=6))
    parents = (torch.arange(6) - 1).expand(2, -1)
    expected = reference.tree_delta(*inputs(i), i.delta_state, parents)
    state, found = i.delta_state, []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        part = [x[:, first:last] for x in inputs(i)]
        step = TokenTree(i.tree.tokens[:, first:last], parents[:, : last - first], check=False)
        found.append(tree(*part, state, step.ancestors))
        commit(*part[1:], state, torch.arange(last - first).expand(2, -1))
    torch.testing.assert_close(torch.cat(found, 1), expected, **CLOSE)


def test_rows_absorb_paths_of_different_lengths(rule):
    _, commit, inputs = rule
    i = draw(Case("chain", batch=4, nodes=5, groups=2))
    path = torch.tensor([[0, 1, 2, 3], [-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1]])
    state, expected = i.delta_state, i.delta_state
    commit(*inputs(i)[1:], state, path)
    reference.commit_delta(*inputs(i)[1:], expected, path)
    torch.testing.assert_close(state, expected, **CLOSE)


def test_great_sums_along_a_path_keep_small_differences(rule):
    """Two steps that forget everything come before ones that forget little."""
    i = draw(Case("chain", batch=1, nodes=8, heads=1, strided=False))
    tree, commit, inputs = rule
    q, k, v, g, beta = inputs(i)
    great = -torch.tensor([3e4, 2e4, 0.01, 0.02, 0.03, 0.01, 0.02, 0.01])
    g[0, :, 0] = great if g.ndim == 3 else great[:, None]
    parents, state, after = (torch.arange(8) - 1)[None], i.delta_state, i.delta_state.double()
    ancestors = TokenTree(i.tree.tokens, parents, check=False).ancestors
    y = tree(q, k, v, g, beta, state, ancestors)
    torch.testing.assert_close(y.double(), reference.tree_delta(q, k, v, g, beta, after, parents), rtol=2e-6, atol=2e-6)
    commit(k, v, g, beta, state, torch.arange(8)[None])
    reference.commit_delta(k, v, g, beta, after, torch.arange(8)[None])
    torch.testing.assert_close(state.double(), after, rtol=2e-6, atol=2e-6)


def test_equal_keys_and_the_highest_rates(rule):
    """The system's inverse stays small, but not the powers of which a series would consist."""
    i = draw(Case("chain", batch=1, nodes=63, heads=1))
    tree, _, inputs = rule
    q, k, v, g, beta = inputs(i)
    k, g, beta = k[:, :1].expand_as(k), torch.zeros_like(g), torch.full_like(beta, 2.0)
    parents = (torch.arange(63) - 1)[None]
    ancestors = TokenTree(i.tree.tokens, parents, check=False).ancestors
    y = tree(q, k, v, g, beta, i.delta_state, ancestors)
    expected = reference.tree_delta(q, k, v, g, beta, i.delta_state.double(), parents)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


def test_nothing_of_the_size_of_a_state_is_allocated(rule):
    tree, commit, inputs = rule
    i = draw(Case(batch=1, nodes=16, heads=8, groups=8, head_dim=128, state=128, strided=False))
    values, state = inputs(i), i.delta_state
    with Allocations() as scanned:
        tree(*values, state, i.tree.ancestors)
    with Allocations() as committed:
        commit(*values[1:], state, i.deepest)
    assert 0 < max(scanned.sizes) <= 2 * 16 * 8 * 128  # of keys and queries
    assert 0 < max(committed.sizes) <= 16 * 8 * 128
    assert max(scanned.sizes) <= state.numel() / 4


def test_wrong_shapes_are_named():
    i = draw(Case())
    q, k, v, g, beta = i.delta
    state, ancestors = i.delta_state, i.tree.ancestors
    with pytest.raises(ValueError, match=r"state must be \(2, 2, 16, 16\) torch.float32: got .* torch.bfloat16"):
        ops.tree_delta(q, k, v, g, beta, state.bfloat16(), ancestors)
    with pytest.raises(ValueError, match="groups must divide heads: got 3 groups of 2 heads"):
        ops.tree_delta(q, k.repeat(1, 1, 3, 1), v, g, beta, state, ancestors)
    with pytest.raises(ValueError, match="beta must be"):
        ops.commit_delta(k, v, g, beta[:, :3], state, i.deepest)
    with pytest.raises(ValueError, match="state must be contiguous"):
        ops.commit_delta(k, v, g, beta, state.transpose(2, 3), i.deepest)
    q, k, v, g, beta = i.kda
    with pytest.raises(ValueError, match=r"g must be .* \(2, 16, 2, 16\): got \(2, 16, 2\)"):
        ops.tree_kda(q, k, v, beta, beta, state, ancestors)
    with pytest.raises(ValueError, match=r"k must be .* \(2, 16, 2, 16\): got \(2, 16, 1, 16\)"):
        ops.commit_kda(k[:, :, :1], v, g, beta, state, i.deepest)
    with pytest.raises(ValueError, match="beta must be"):
        ops.commit_kda(k, v, g, beta[:, :3], state, i.deepest)
    with pytest.raises(ValueError, match="state must be contiguous"):
        ops.commit_kda(k, v, g, beta, state.transpose(2, 3), i.deepest)


def test_lineages_lead_to_the_root(monkeypatch):
    """As long as the deepest path, or as the tree where shapes are fixed, which computes the same."""
    i = draw(Case(nodes=20, batch=3))
    lineages, depth = _lineages(i.tree.ancestors), i.deepest.shape[1]
    assert lineages.shape == (3, 20, depth)
    for node in range(20):
        path = paths_to(i.tree.parents, torch.full((3,), node))
        for row in range(3):
            up = [at for at in reversed(path[row].tolist()) if at >= 0]
            assert lineages[row, node].tolist() == up + [-1] * (depth - len(up))
    monkeypatch.setattr(kernels, "fixed_shapes", lambda device: True)
    assert _lineages(i.tree.ancestors).shape == (3, 20, 20)
    check_kda(Case(nodes=20, batch=3))
