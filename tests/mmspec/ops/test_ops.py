"""The operations of a step in plain torch, against loops; ``test_ops_triton`` runs the same grid over the kernels."""

import pytest
import torch

from mmspec import ops
from tests.mmspec.ops.ops_grid import CHECKS


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_grid(check):
    check()


def test_shapes_are_checked():
    q, kv, lengths = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 9, 8), torch.tensor([5])
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"kv_heads dividing heads: got \(1, 3, 9, 8\)"):
        ops.tree_attention(q, kv[:, [0, 1, 1]], kv[:, [0, 1, 1]], lengths, mask)
    with pytest.raises(ValueError, match=r"mask \(batch, nodes, tail\) .* and \(1, 2, 3\)"):
        ops.tree_attention(q, kv, kv, lengths, mask[:, :2])
    with pytest.raises(ValueError, match="a window needs the depth of each node"):
        ops.tree_attention(q, kv, kv, lengths, mask, window=4)
    with pytest.raises(ValueError, match=r"expected storage .* path \(batch, depth\) and lengths \(batch,\)"):
        ops.compact_kv(torch.zeros(2, 1, 2, 9, 8), torch.zeros(2, 1, dtype=torch.long), 5, lengths)
