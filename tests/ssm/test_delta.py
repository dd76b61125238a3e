"""Gated delta rules over trees in torch, of Gated DeltaNet and KDA, beyond the grid of ``ops_grid``."""

import pytest
import torch

from mmspec.core.tree import TokenTree
from mmspec.ops import kernels
from mmspec.ssm import ops
from mmspec.ssm.ops.kda import _lineages
from tests.ssm.ops_grid import RULES, Allocations, Case, check_tree, draw, paths_to

pytestmark = pytest.mark.usefixtures("plain_torch")
rules = pytest.mark.parametrize("rule", RULES[1:3], ids=lambda rule: rule.name)


@rules
def test_great_sums_along_a_path_keep_small_differences(rule):
    """Two steps that forget everything come before ones that forget little."""
    i = draw(Case("chain", batch=1, nodes=8, heads=1, strided=False))
    values = rule.inputs(i)
    g = values[3]
    great = -torch.tensor([3e4, 2e4, 0.01, 0.02, 0.03, 0.01, 0.02, 0.01])
    g[0, :, 0] = great if g.ndim == 3 else great[:, None]
    parents, state, close = (torch.arange(8) - 1)[None], i.delta_state, dict(rtol=2e-6, atol=2e-6)
    y = rule.tree(values, state, TokenTree(i.tree.tokens, parents, check=False).ancestors)
    torch.testing.assert_close(y, rule.expected_tree(values, state, parents), **close)
    path = torch.arange(8)[None]
    rule.commit(values, state, path)
    torch.testing.assert_close(state, rule.expected_commit(values, i.delta_state, path), **close)


@rules
def test_equal_keys_and_the_highest_rates(rule):
    """The system's inverse stays small, but not the powers of which a series would consist."""
    i = draw(Case("chain", batch=1, nodes=63, heads=1))
    q, k, v, g, beta = rule.inputs(i)
    values = q, k[:, :1].expand_as(k), v, torch.zeros_like(g), torch.full_like(beta, 2.0)
    parents = (torch.arange(63) - 1)[None]
    y = rule.tree(values, i.delta_state, TokenTree(i.tree.tokens, parents, check=False).ancestors)
    torch.testing.assert_close(y, rule.expected_tree(values, i.delta_state, parents), rtol=1e-5, atol=1e-4)


@rules
def test_nothing_of_the_size_of_a_state_is_allocated(rule):
    i = draw(Case(batch=1, nodes=16, heads=8, groups=8, head_dim=128, state=128, strided=False))
    values, state = rule.inputs(i), i.delta_state
    with Allocations() as scanned:
        rule.tree(values, state, i.tree.ancestors)
    with Allocations() as committed:
        rule.commit(values, state, i.deepest)
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
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    assert _lineages(i.tree.ancestors).shape == (3, 20, 20)
    check_tree(RULES[2], Case(nodes=20, batch=3))
