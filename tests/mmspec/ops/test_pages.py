"""Memory of huge pages, of which large caches consist."""

from __future__ import annotations

import pytest
import torch

from mmspec.cache.tree_cache import TreeCache
from mmspec.ops import cpu


@pytest.mark.skipif(not hasattr(cpu.mmap, "MADV_HUGEPAGE"), reason="needs Linux")
def test_zeros_begin_at_a_page():
    memory = cpu.zeros(3 * cpu.PAGE + 5)
    assert memory is not None
    assert memory.shape == (3 * cpu.PAGE + 5,)
    assert memory.data_ptr() % cpu.PAGE == 0
    assert not memory.any()


@pytest.mark.parametrize("system", ["linux", "other"])
def test_large_caches_grow(system, monkeypatch):
    if system == "other":
        monkeypatch.delattr("mmspec.ops.cpu.mmap.MADV_HUGEPAGE", raising=False)
    cache = TreeCache(2, reserve=3000)  # 12 MB, then more
    states = torch.randn(1, 4, 2999, 128)
    for layer in (0, 1):
        cache.update(states, -states, layer)
    cache.commit_prompt(2999, None, 1)
    more = torch.randn(1, 4, 9, 128)
    for layer in (0, 1):
        keys, values = cache.update(more, -more, layer)
        assert torch.equal(keys, torch.cat([states, more], dim=2))
        assert torch.equal(values, -keys)
    large = hasattr(cpu.mmap, "MADV_HUGEPAGE")
    assert not large or cache.kv.tensors[0].data_ptr() % cpu.PAGE == 0
