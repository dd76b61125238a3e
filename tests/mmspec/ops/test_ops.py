"""The operations of a step in plain torch, against loops; ``test_ops_triton`` runs the same grid over the kernels."""

import re
from contextlib import nullcontext

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


ATTENTION = {"query": (2, 4, 3, 8), "key": (2, 2, 9, 8), "value": (2, 2, 9, 6), "prefix": (2,), "mask": (2, 3, 5)}
COMPACT = {"storage": (4, 2, 3, 9, 8), "path": (2, 5), "lengths": (2,)}


WRONG_SHAPES = {
    "keys and values must be (batch, kv_heads, slots, head_dim), kv_heads dividing heads": (
        *({"value": shape} for shape in ((1, 2, 9, 6), (2, 1, 9, 6), (2, 2, 8, 6))),
        {"key": (1, 2, 9, 8), "value": (1, 2, 9, 6)},
        {"key": (2, 2, 9, 6)},
        {"key": (2, 3, 9, 8), "value": (2, 3, 9, 6)},
    ),
    "prefix must be (batch,) and mask (batch, nodes, tail)": (
        *({"mask": shape} for shape in ((1, 3, 5), (2, 2, 5))),
        *({"prefix": shape} for shape in ((1,), (2, 1))),
    ),
    "a window needs the depth of each node": ({"window": 4},),
    "expected storage (layers * 2, batch, kv_heads, slots, head_dim), path (batch, depth)": (
        {"storage": (4, 2, 9, 8)},
        {"path": (2,)},
        {"path": (1, 5), "lengths": (1,)},
        {"lengths": (1,)},
    ),
    "": ({}, {"window": 4, "depth": (2, 3)}, {"path": (2, 5)}),
}


@pytest.mark.parametrize(
    ("message", "changes"), [(message, one) for message, some in WRONG_SHAPES.items() for one in some], ids=str
)
def test_shapes_are_checked(message, changes):
    """Shapes that differ in every axis, and one change each."""
    compacts = changes.keys() & COMPACT.keys()
    types = {"mask": torch.bool, "path": torch.long, "prefix": torch.int, "lengths": torch.long}
    made = {
        name: torch.zeros(shape, dtype=types.get(name)) if isinstance(shape, tuple) else shape
        for name, shape in ((COMPACT if compacts else ATTENTION) | changes).items()
    }
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") if message else nullcontext():
        ops.compact_kv(start=2, **made) if compacts else ops.tree_attention(**made)
