"""The C++ kernels that draft: trees of a recurrent cell against growth by torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mmspec.core.plan import StepPlan
from mmspec.drafters.growth import grow_tree
from mmspec.ops import cpu
from tests.compiled import needs_kernels
from tests.mmspec.ops.test_cpu import THREADS, layer_of, threads

__all__ = ["threads"]


@needs_kernels
@pytest.mark.parametrize(
    ("batch", "width", "depth", "least_gain", "nodes"),
    [(1, 4, 6, 0, 200), (3, 50, 3, 0, 200), (2, 4, 6, 0.5, 200), (2, 4, 1, 0, 200), (1, 4, 6, 0, 3), (2, 4, 6, 0, 9)],
)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_tree_of_a_cell_is_that_of_torch(batch, width, depth, least_gain, nodes, mapped, monkeypatch):
    """Inner width, tokens and rank differ from the states' width; 150 rows are more than are computed at a time."""
    torch.manual_seed(batch)
    shapes = {"into": (48, 64), "out": (64, 48), "guess": (20, 64), "head": (90, 20)}
    layers = {name: layer_of("float32", *shape, bias=name in ("guess", "head"))[0] for name, shape in shapes.items()}
    table, norm = torch.randn(90, 48), torch.nn.LayerNorm(64, 1e-5).requires_grad_(False)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    weights = cpu.cell_weights([layer.native for layer in layers.values()], table, norm)
    product = lambda name, x: layers[name](x)  # noqa: E731
    carried, last, ids = torch.randn(batch, 64), torch.arange(7, 7 + batch), torch.randperm(200)[:90]
    first = torch.randn(batch, 90).log_softmax(-1).topk(5)[::-1]
    states = [carried[:, None]]

    def extend(beam, origin):
        before = states[-1].gather(1, origin[..., None].expand(-1, -1, 64))
        states.append(norm(before + product("out", F.silu(table[beam] + product("into", before)))))
        return product("head", product("guess", states[-1])).log_softmax(-1).topk(min(width, 90))[::-1]

    expected = grow_tree(last, first, extend, StepPlan(nodes, depth, least_gain=least_gain), width)
    for count in THREADS:
        torch.set_num_threads(count)
        found, levels = cpu.draft_cells(
            weights, carried, first, last, ids if mapped else None, width, depth, least_gain, nodes
        )
        assert levels == expected.levels
        tokens = torch.cat([last[:, None], ids[expected.tokens[:, 1:]]], dim=1) if mapped else expected.tokens
        assert torch.equal(found[0], tokens)
        assert torch.equal(found[1], expected.parents)
        torch.testing.assert_close(found[2], expected.log_probs, atol=1e-4, rtol=1e-4)
