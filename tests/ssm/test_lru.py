"""The gated linear recurrence over trees in torch, beyond the grid of ``ops_grid``."""

import pytest

from mmspec.ssm import ops
from tests.ssm.ops_grid import Allocations, Case, draw

pytestmark = pytest.mark.usefixtures("plain_torch")
CLOSE = dict(rtol=1e-5, atol=1e-5)


def test_only_the_outputs_are_of_the_size_of_all_nodes():
    i = draw(Case("chain", batch=1, nodes=63, heads=8, head_dim=64, strided=False))
    inputs, state, levels = i.lru, i.lru_state, ops.depth_index(i.tree.ancestors)
    assert levels.slots  # computed once, for all layers
    assert levels.sources
    with Allocations() as scanned:
        ops.tree_lru(*inputs, state, levels)
    assert [size for size in scanned.sizes if size > state.numel()] == [64 * state.numel()]


def test_wrong_shapes_are_named():
    i = draw(Case())
    x, a = i.lru
    state, levels = i.lru_state, ops.depth_index(i.tree.ancestors)
    with pytest.raises(ValueError, match=r"state must be \(2, 32\) torch.float32: got \(2, 32\) torch.bfloat16"):
        ops.tree_lru(x, a, state.bfloat16(), levels)
    with pytest.raises(ValueError, match=r"a must be .* \(2, 16, 32\): got \(2, 3, 32\)"):
        ops.commit_lru(x, a[:, :3], state, i.deepest)
    with pytest.raises(ValueError, match="state must be contiguous"):
        ops.commit_lru(x, a, state.t().contiguous().t(), i.deepest)
