"""Recurrences and convolutions over trees in torch, against loops that follow parents."""

import pytest
import torch

from mmspec.core.tree import TokenTree
from mmspec.ops import kernels
from mmspec.ssm import ops
from mmspec.ssm.ops import scan
from tests.ssm import reference
from tests.ssm.ops_grid import CASES, CHECKS, RULES, Allocations, Case, check_tree, draw, paths_to

pytestmark = pytest.mark.usefixtures("plain_torch")
CLOSE = dict(rtol=1e-5, atol=1e-5)
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
by_level = pytest.mark.parametrize("rule", [rule for rule in RULES if rule.levels], ids=lambda rule: rule.name)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trees_and_commits_follow_parents(case, check):
    check(case)


def test_rows_of_a_large_batch_are_computed_one_by_one(monkeypatch):
    monkeypatch.setattr(scan, "_LARGE", 1)
    check_tree(RULES[0], Case(batch=3, nodes=9, heads=4, groups=2))
    check_tree(RULES[0], Case(batch=3, nodes=1, heads=4, groups=2))


@by_level
def test_nodes_are_computed_alike_one_by_one(rule, monkeypatch):
    """As with static shapes, where the host does not read the tree."""
    i = draw(Case(nodes=20, batch=3))
    expected = rule.tree(rule.inputs(i), rule.state(i), i.tree.ancestors)
    monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    assert [nodes.tolist() for nodes in ops.depth_index(i.tree.ancestors).nodes] == [
        [at, at + 20, at + 40] for at in range(20)
    ]
    torch.testing.assert_close(rule.tree(rule.inputs(i), rule.state(i), i.tree.ancestors), expected, **CLOSE)


@rules
def test_commit_at_every_node_of_a_tree(rule):
    i = draw(Case(batch=1, nodes=12, heads=4, groups=2, head_dim=5, state=12))
    for node in range(12):
        path, state = paths_to(i.tree.parents, torch.tensor([node])), rule.state(i)
        rule.commit(rule.inputs(i), state, path)
        torch.testing.assert_close(state, rule.expected_commit(rule.inputs(i), rule.state(i), path), **CLOSE)


@rules
def test_a_step_without_drafts_after_several_were_accepted(rule):
    """Steps of 4 accepted nodes, of 1 and of 1 end where a chain of 6 does."""
    i = draw(Case("chain", batch=2, nodes=6))
    parents = (torch.arange(6) - 1).expand(2, -1)
    state, found = rule.state(i), []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        values = rule.nodes(rule.inputs(i), first, last)
        step = TokenTree(i.tree.tokens[:, first:last], parents[:, : last - first], check=False)
        found.append(rule.tree(values, state, step.ancestors))
        rule.commit(values, state, torch.arange(last - first).expand(2, -1))
    expected = rule.expected_tree(rule.inputs(i), rule.state(i), parents)
    torch.testing.assert_close(torch.cat(found, 1), expected, **CLOSE)


@rules
def test_rows_commit_paths_of_different_lengths(rule):
    i = draw(Case("chain", batch=4, nodes=5, groups=2))
    path, state = torch.tensor([[0, 1, 2, 3], [-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1]]), rule.state(i)
    rule.commit(rule.inputs(i), state, path)
    torch.testing.assert_close(state, rule.expected_commit(rule.inputs(i), rule.state(i), path), **CLOSE)


def test_the_convolution_s_state_after_paths_of_different_lengths_and_further_steps():
    i = draw(Case("chain", batch=4, nodes=5, groups=2))
    state, expected = i.conv_state.clone(), i.conv_state.clone()
    for path in (torch.tensor([[0, 1, 2, 3], [-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1]]), torch.zeros(4, 1).long()):
        ops.commit_conv(i.channels, state, path)
        reference.commit_conv(i.channels, expected, path)
        assert torch.equal(state, expected)
    window = ops.conv_window(i.tree.parents, 4)
    found = ops.tree_conv(i.channels, state, i.weight, i.bias, window)
    torch.testing.assert_close(found, reference.tree_conv(i.channels, state, i.weight, i.bias, i.tree.parents), **CLOSE)


def test_great_sums_along_a_path_keep_small_differences():
    """Two steps that forget everything stand before ones that forget little: the sums differ by a millionth part."""
    case = Case("chain", batch=1, nodes=8, heads=1, strided=False)
    i = draw(case)
    i.dt[0, :, 0] = torch.tensor([3e4, 2e4, 0.01, 0.02, 0.03, 0.01, 0.02, 0.01])
    i.a.fill_(-1.0)
    parents = (torch.arange(8) - 1)[None]
    tree = TokenTree(i.tree.tokens, parents, check=False)
    y = ops.tree_scan(i.x, i.dt, i.a, i.b, i.c, i.d, i.state, tree.ancestors)
    expected = reference.tree_scan(i.x, i.dt, i.a, i.b, i.c, i.d, i.state, parents)
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=0.5)
    state, after = i.state.clone(), i.state.clone()
    ops.commit_scan(i.x, i.dt, i.a, i.b, state, torch.arange(8)[None])
    reference.commit_scan(i.x, i.dt, i.a, i.b, after, torch.arange(8)[None])
    torch.testing.assert_close(state, after, rtol=2e-6, atol=0.05)


def test_nothing_of_the_size_of_a_state_is_allocated():
    case = Case(batch=1, nodes=16, heads=8, head_dim=64, state=128, strided=False)
    i = draw(case)
    with Allocations() as scanned:
        ops.tree_scan(i.x, i.dt, i.a, i.b, i.c, i.d, i.state, i.tree.ancestors)
    with Allocations() as committed:
        ops.commit_scan(i.x, i.dt, i.a, i.b, i.state, i.deepest)
    outputs = case.nodes * case.heads * case.head_dim
    assert 0 < max(scanned.sizes) <= outputs
    assert 0 < max(committed.sizes) <= outputs
    assert outputs < 0.13 * i.state.numel()


def test_wrong_shapes_are_named():
    i = draw(Case())
    with pytest.raises(ValueError, match=r"state must be \(2, 2, 16, 16\) torch.float32: got .* torch.bfloat16"):
        ops.tree_scan(i.x, i.dt, i.a, i.b, i.c, i.d, i.state.bfloat16(), i.tree.ancestors)
    with pytest.raises(ValueError, match="groups must divide heads: got 3 groups of 2 heads"):
        ops.tree_scan(i.x, i.dt, i.a, i.b.repeat(1, 1, 3, 1), i.c, i.d, i.state, i.tree.ancestors)
    with pytest.raises(ValueError, match="dt must be"):
        ops.commit_scan(i.x, i.dt[:, :3], i.a, i.b, i.state, i.deepest)
    with pytest.raises(ValueError, match="state must be contiguous"):
        ops.commit_scan(i.x, i.dt, i.a, i.b, i.state.transpose(2, 3), i.deepest)
    window = ops.conv_window(i.tree.parents, 4)
    with pytest.raises(ValueError, match=r"of width 4 must be .* 3 or more"):
        ops.tree_conv(i.channels, i.conv_state[:, :, :2], i.weight, i.bias, window)
    with pytest.raises(ValueError, match=r"activation must be .* got 'tanh'"):
        ops.tree_conv(i.channels, i.conv_state, i.weight, i.bias, window, activation="tanh")
