"""Mamba-1's scan over trees in torch, beyond the grid of ``ops_grid``."""

import pytest
import torch

from mmspec.core.tree import TokenTree
from mmspec.ops import kernels
from mmspec.ssm import ops
from mmspec.ssm.ops import reference, tiles
from tests.ssm.ops_grid import Allocations, Case, check_selective, check_selective_commit, draw, paths_to

CLOSE = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")


def test_tiles_of_channels(monkeypatch):
    """Several tiles per group, the last one narrower."""
    monkeypatch.setattr(tiles, "_TILE", (1, 1))
    monkeypatch.setattr(tiles, "_NARROWEST", 5)
    case = Case(batch=2, nodes=9, heads=4, groups=2)
    check_selective(case)
    check_selective_commit(case)


def test_nodes_are_computed_alike_one_by_one(monkeypatch):
    """As where shapes are fixed, and the host does not read the tree."""
    i = draw(Case(nodes=20, batch=3))
    expected = ops.tree_selective(*i.selective, i.selective_state, ops.tree_levels(i.tree.ancestors))
    monkeypatch.setattr(kernels, "fixed_shapes", lambda device: True)
    levels = ops.tree_levels(i.tree.ancestors)
    assert [nodes.tolist() for nodes in levels.nodes] == [[at, at + 20, at + 40] for at in range(20)]
    torch.testing.assert_close(ops.tree_selective(*i.selective, i.selective_state, levels), expected, **CLOSE)


def test_levels_are_parents_before_children():
    i = draw(Case(nodes=31, batch=3))
    levels, done = ops.tree_levels(i.tree.ancestors), set()
    for nodes, slots, sources in zip(levels.nodes, levels.slots, levels.sources, strict=True):
        for node, slot, source in zip(nodes.tolist(), slots.tolist(), sources.tolist(), strict=True):
            row, at = divmod(node, 31)
            assert slot == row * 32 + at + 1
            assert source == row * 32 + int(i.tree.parents[row, at]) + 1
            assert source % 32 == 0 or source in done
        done |= set(slots.tolist())
    assert len(done) == 3 * 31


def test_commit_at_every_node_of_a_tree():
    i = draw(Case(batch=1, nodes=12, heads=4, groups=2, head_dim=5, state=12))
    for node in range(12):
        path = paths_to(i.tree.parents, torch.tensor([node]))
        state, expected = i.selective_state, i.selective_state.double()
        ops.commit_selective(*i.selective[:4], state, path)
        reference.commit_selective(*i.selective[:4], expected, path)
        torch.testing.assert_close(state, expected.float(), **CLOSE)


def test_a_step_without_drafts_after_several_were_accepted():
    """Steps of 4 accepted nodes, of 1 and of 1 end where a chain of 6 does."""
    i = draw(Case("chain", batch=2, nodes=6))
    x, dt, a, b, c, d = i.selective
    parents = (torch.arange(6) - 1).expand(2, -1)
    expected = reference.tree_selective(x, dt, a, b, c, d, i.selective_state, parents)
    state, found = i.selective_state, []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        inputs = [t[:, first:last] for t in (x, dt, b, c)]
        step = TokenTree(i.tree.tokens[:, first:last], parents[:, : last - first], check=False)
        levels = ops.tree_levels(step.ancestors)
        found.append(ops.tree_selective(*inputs[:2], a, *inputs[2:], d, state, levels))
        ops.commit_selective(*inputs[:2], a, inputs[2], state, torch.arange(last - first).expand(2, -1))
    torch.testing.assert_close(torch.cat(found, 1), expected, **CLOSE)


def test_rows_absorb_paths_of_different_lengths():
    i = draw(Case("chain", batch=4, nodes=5, groups=2))
    path = torch.tensor([[0, 1, 2, 3], [-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1]])
    state, expected = i.selective_state, i.selective_state
    ops.commit_selective(*i.selective[:4], state, path)
    reference.commit_selective(*i.selective[:4], expected, path)
    torch.testing.assert_close(state, expected, **CLOSE)


def test_temporaries_are_limited(monkeypatch):
    """Those of a tile, not of all channels: its states at all nodes, or one in a commit."""
    monkeypatch.setattr(tiles, "_TILE", (1, 1))
    i = draw(Case(batch=1, nodes=64, heads=16, groups=2, head_dim=256, state=16, strided=False))
    inputs, state = i.selective, i.selective_state
    levels = ops.tree_levels(i.tree.ancestors)
    with Allocations() as scanned:
        ops.tree_selective(*inputs, state, levels)
    with Allocations() as committed:
        ops.commit_selective(*inputs[:4], state, i.deepest)
    tile = tiles._NARROWEST * 16
    assert 0 < max(scanned.sizes) <= tile * 65
    assert tile * 65 < 0.2 * 64 * state.numel()
    assert 0 < max(committed.sizes) <= max(tile, i.deepest.shape[1] * 4096) < 0.6 * state.numel()


def test_wrong_shapes_are_named():
    i = draw(Case())
    x, dt, a, b, c, d = i.selective
    state, levels = i.selective_state, ops.tree_levels(i.tree.ancestors)
    with pytest.raises(ValueError, match=r"state must be \(2, 32, 16\) torch.float32: got .* torch.bfloat16"):
        ops.tree_selective(x, dt, a, b, c, d, state.bfloat16(), levels)
    with pytest.raises(ValueError, match="groups must divide channels: got 3 groups of 32 channels"):
        ops.tree_selective(x, dt, a, b.repeat(1, 1, 3, 1), c, d, state, levels)
    with pytest.raises(ValueError, match=r"dt must be .* \(2, 16, 32\): got \(2, 3, 32\)"):
        ops.commit_selective(x, dt[:, :3], a, b, state, i.deepest)
    with pytest.raises(ValueError, match=r"a must be \(channels, state\) \(32, 16\): got \(32, 15\)"):
        ops.commit_selective(x, dt, a[:, :15], b, state, i.deepest)
    with pytest.raises(ValueError, match="state must be contiguous"):
        ops.commit_selective(x, dt, a, b, state.transpose(1, 2).contiguous().transpose(1, 2), i.deepest)
