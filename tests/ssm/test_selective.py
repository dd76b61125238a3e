"""Mamba-1's scan over trees in torch, beyond the grid of ``ops_grid``."""

import pytest

from mmspec.ssm import ops
from mmspec.ssm.ops import selective
from tests.ssm.ops_grid import RULES, Allocations, Case, check_commit, check_tree, draw

pytestmark = pytest.mark.usefixtures("plain_torch")
CLOSE = dict(rtol=1e-5, atol=1e-5)


def test_tiles_of_channels(monkeypatch):
    """Several tiles per group, the last one narrower."""
    monkeypatch.setattr(selective, "_TILE", (1, 1))
    monkeypatch.setattr(selective, "_NARROWEST", 5)
    case = Case(batch=2, nodes=9, heads=4, groups=2)
    check_tree(RULES[3], case)
    check_commit(RULES[3], case)


def test_levels_are_parents_before_children():
    i = draw(Case(nodes=31, batch=3))
    levels, done = ops.depth_index(i.tree.ancestors), set()
    for nodes, slots, sources in zip(levels.nodes, levels.slots, levels.sources, strict=True):
        for node, slot, source in zip(nodes.tolist(), slots.tolist(), sources.tolist(), strict=True):
            row, at = divmod(node, 31)
            assert slot == row * 32 + at + 1
            assert source == row * 32 + int(i.tree.parents[row, at]) + 1
            assert source % 32 == 0 or source in done
        done |= set(slots.tolist())
    assert len(done) == 3 * 31


def test_temporaries_are_limited(monkeypatch):
    """Those of a tile, not of all channels: its states at all nodes, or one in a commit."""
    monkeypatch.setattr(selective, "_TILE", (1, 1))
    i = draw(Case(batch=1, nodes=64, heads=16, groups=2, head_dim=256, state=16, strided=False))
    inputs, state = i.selective, i.selective_state
    levels = ops.depth_index(i.tree.ancestors)
    with Allocations() as scanned:
        ops.tree_selective(*inputs, state, levels)
    with Allocations() as committed:
        ops.commit_selective(*inputs[:4], state, i.deepest)
    tile = selective._NARROWEST * 16
    assert 0 < max(scanned.sizes) <= tile * 65
    assert tile * 65 < 0.2 * 64 * state.numel()
    assert 0 < max(committed.sizes) <= max(tile, i.deepest.shape[1] * 4096) < 0.6 * state.numel()


def test_wrong_shapes_are_named():
    i = draw(Case())
    x, dt, a, b, c, d = i.selective
    state, levels = i.selective_state, ops.depth_index(i.tree.ancestors)
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
