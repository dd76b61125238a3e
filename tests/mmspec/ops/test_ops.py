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


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        *(
            (ATTENTION, changes, "keys and values must be (batch, kv_heads, slots, head_dim), kv_heads dividing heads")
            for changes in (
                {"key": (1, 2, 9, 8), "value": (1, 2, 9, 6)},
                {"value": (1, 2, 9, 6)},
                {"value": (2, 1, 9, 6)},
                {"value": (2, 2, 8, 6)},
                {"key": (2, 2, 9, 6)},
                {"key": (2, 3, 9, 8), "value": (2, 3, 9, 6)},
            )
        ),
        *(
            (ATTENTION, changes, "prefix must be (batch,) and mask (batch, nodes, tail)")
            for changes in ({"mask": (1, 3, 5)}, {"mask": (2, 2, 5)}, {"prefix": (1,)}, {"prefix": (2, 1)})
        ),
        (ATTENTION, {"window": 4}, "a window needs the depth of each node"),
        (ATTENTION, {"window": 4, "depth": (2, 3)}, None),
        (ATTENTION, {}, None),
        (COMPACT, {}, None),
        *(
            (COMPACT, changes, "expected storage (layers * 2, batch, kv_heads, slots, head_dim), path (batch, depth)")
            for changes in (
                {"storage": (4, 2, 9, 8)},
                {"path": (2,)},
                {"path": (1, 5), "lengths": (1,)},
                {"lengths": (1,)},
            )
        ),
    ],
    ids=str,
)
def test_shapes_are_checked(base, changes, message):
    """A base with shapes that differ in every axis, and one change each."""
    made = {
        name: torch.zeros(shape, dtype={"mask": torch.bool, "path": torch.long, "prefix": torch.int}.get(name))
        if isinstance(shape, tuple)
        else shape
        for name, shape in (base | changes).items()
    }
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") if message else nullcontext():
        if base is ATTENTION:
            ops.tree_attention(**made)
        else:
            ops.compact_kv(start=2, **(made | {"lengths": made["lengths"].long()}))
