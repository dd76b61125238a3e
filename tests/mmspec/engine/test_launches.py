"""Launches of a decode step, on a fake CUDA device."""

import pytest

pytest.importorskip("triton")
from tests.launches import LAYERS, measure


@pytest.mark.parametrize(
    ("drafter", "draft"), [("none", 0), ("msd", 145), ("flash", 145), ("eagle3", 158), ("dflash", 115)]
)
def test_a_step(drafter, draft):
    """Few in a layer and in a draft, few outside of graphs, and none of either that grows unnoticed."""
    found = measure(drafter)
    parts = {name: counts.total() for name, counts in found["parts"].items()}
    assert parts["_pass"] / LAYERS < 11
    assert parts.get("_grown", 0) <= draft
    assert parts["commit_on_device"] <= 10
    assert found["outside"].total() <= (20 if draft else 10)
    assert found["graphs"].total() == (3 if draft else 2)
