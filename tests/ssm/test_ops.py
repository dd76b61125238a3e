"""The scan and the convolution over trees in torch, against loops that follow parents."""

import pytest
import torch

from mmspec.core.tree import TokenTree
from mmspec.ssm import ops
from mmspec.ssm.ops import reference, scan
from tests.ssm.ops_grid import CASES, CHECKS, Allocations, Case, check_tree, draw, paths_to


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trees_and_commits_follow_parents(case, check):
    check(case)


def test_rows_of_a_large_batch_are_computed_one_by_one(monkeypatch):
    case = Case(batch=3, nodes=9, heads=4, groups=2)
    monkeypatch.setattr(scan, "_LARGE", 1)
    check_tree(case)
    check_tree(Case(batch=3, nodes=1, heads=4, groups=2))


def test_commit_at_every_node_of_a_tree():
    case = Case(batch=1, nodes=12, heads=3, groups=3, head_dim=20, state=12)
    i = draw(case)
    for node in range(case.nodes):
        path = paths_to(i.tree.parents, torch.tensor([node]))
        state, conv_state = i.state.clone(), i.conv_state.clone()
        expected, expected_conv = i.state.clone(), i.conv_state.clone()
        ops.commit_scan(i.x, i.dt, i.a, i.b, state, path)
        ops.commit_conv(i.channels, conv_state, path)
        reference.commit_scan(i.x, i.dt, i.a, i.b, expected, path)
        reference.commit_conv(i.channels, expected_conv, path)
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(conv_state, expected_conv)


def test_a_step_without_drafts_after_several_were_accepted():
    """Steps of 4 accepted nodes, of 1 and of 1 end where a chain of 6 does."""
    case = Case("chain", batch=2, nodes=6)
    i = draw(case)
    parents = (torch.arange(6) - 1).expand(2, -1)
    chain = TokenTree(i.tree.tokens, parents, check=False)
    expected = reference.tree_scan(i.x, i.dt, i.a, i.b, i.c, i.d, i.state, parents)
    expected_conv = reference.tree_conv(i.channels, i.conv_state, i.weight, i.bias, parents)
    found, found_conv = [], []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        x, dt, b, c, channels = (t[:, first:last] for t in (i.x, i.dt, i.b, i.c, i.channels))
        step = TokenTree(chain.tokens[:, first:last], parents[:, : last - first], check=False)
        found.append(ops.tree_scan(x, dt, i.a, b, c, i.d, i.state, step.ancestors))
        window = ops.conv_window(step.parents, case.width)
        found_conv.append(ops.tree_conv(channels, i.conv_state, i.weight, i.bias, window))
        path = torch.arange(last - first).expand(2, -1)
        ops.commit_scan(x, dt, i.a, b, i.state, path)
        ops.commit_conv(channels, i.conv_state, path)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(found_conv, 1), expected_conv, rtol=1e-5, atol=1e-5)


def test_rows_absorb_paths_of_different_lengths():
    case = Case("chain", batch=4, nodes=5, groups=2)
    i = draw(case)
    path = torch.tensor([[0, 1, 2, 3], [-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1]])
    before, before_conv = i.state.clone(), i.conv_state.clone()
    ops.commit_scan(i.x, i.dt, i.a, i.b, i.state, path)
    ops.commit_conv(i.channels, i.conv_state, path)
    for row in range(4):
        alone = slice(row, row + 1)
        state, conv_state = before[alone].clone(), before_conv[alone].clone()
        reference.commit_scan(i.x[alone], i.dt[alone], i.a, i.b[alone], state, path[alone])
        reference.commit_conv(i.channels[alone], conv_state, path[alone])
        torch.testing.assert_close(i.state[alone], state, rtol=1e-5, atol=1e-5)
        assert torch.equal(i.conv_state[alone], conv_state)


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


def test_the_state_is_only_read():
    i = draw(CASES[6])
    state, conv_state = i.state.clone(), i.conv_state.clone()
    check_tree(CASES[6])
    ops.tree_scan(i.x, i.dt, i.a, i.b, i.c, i.d, i.state, i.tree.ancestors)
    ops.tree_conv(i.channels, i.conv_state, i.weight, i.bias, ops.conv_window(i.tree.parents, 4))
    assert torch.equal(i.state, state)
    assert torch.equal(i.conv_state, conv_state)


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
