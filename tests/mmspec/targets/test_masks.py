"""Masks of a pass over tree nodes against a loop over rows, nodes and slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmspec.cache.tree_cache import TreeCache
from mmspec.targets.attention import slot_limit, tail_mask, tree_mask, window_of

KINDS = ["full_attention", "sliding_attention"]


def config(window=None, kinds=None, attention="sdpa"):
    return SimpleNamespace(sliding_window=window, layer_types=kinds, _attn_implementation=attention)


def cache_of(lengths, padding=(0, 0)):
    """A cache with rows of these lengths; ``padding`` tokens at the start are dropped."""
    cache, longest = TreeCache(2), max(lengths)
    attended = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, (length, begin) in enumerate(zip(lengths, padding, strict=True)):
        attended[row, begin:length] = 1
    keys = torch.zeros(len(lengths), 1, longest, 1)
    cache.layers[0].update(keys, keys)
    cache.commit_prompt(longest, None if attended.all() else attended, len(lengths))
    return cache


def nodes_of(seed, batch=2, nodes=5, earlier=0):
    """Depths of new and earlier nodes, and the nodes that each new node attends to."""
    g = torch.Generator().manual_seed(seed)
    depth = torch.randint(4, (batch, nodes), generator=g)
    tail = torch.randint(4, (batch, earlier), generator=g) if earlier else None
    return depth, tail, torch.rand(batch, nodes, earlier + nodes, generator=g) < 0.6


def by_loop(cache, depth, tail_depth, reach, window):
    batch, nodes, behind = reach.shape
    tail = depth if tail_depth is None else torch.cat([tail_depth, depth], 1)
    allowed = torch.zeros(batch, 1, nodes, cache.length + behind, dtype=torch.bool)
    for b in range(batch):
        for i in range(nodes):
            here = cache.lengths[b] + int(depth[b, i])
            for slot in range(cache.length):
                allowed[b, 0, i, slot] = bool(cache.attended[b, slot]) and (window is None or here - slot < window)
            for j in range(behind):
                distance = here - cache.lengths[b] - int(tail[b, j])
                allowed[b, 0, i, cache.length + j] = bool(reach[b, i, j]) and (window is None or distance < window)
    return allowed


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_chunks_equal_a_loop(chunk):
    cache, (depth, tail, reach) = cache_of((6, 4)), nodes_of(1, earlier=3)
    text = config(kinds=["full_attention", "chunked_attention"])
    text.attention_chunk_size = chunk
    masks = tree_mask(text, cache, depth, tail, reach, torch.float32)
    expected = by_loop(cache, depth, tail, reach, None)
    assert torch.equal(masks["full_attention"], expected)
    behind = torch.cat([tail, depth], 1)
    for b, length in enumerate(cache.lengths):
        positions = [*range(cache.length), *(length + behind[b]).tolist()]
        for i in range(depth.shape[1]):
            same = [at // chunk == (length + int(depth[b, i])) // chunk for at in positions]
            expected[b, 0, i] &= torch.tensor(same)
    assert torch.equal(masks["chunked_attention"], expected)


@pytest.mark.parametrize("earlier", [0, 3])
@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize(("lengths", "padding"), [((6, 6), (0, 0)), ((6, 4), (0, 0)), ((6, 6), (2, 0))])
def test_masks_equal_a_loop(lengths, padding, window, earlier):
    cache, (depth, tail, reach) = cache_of(lengths, padding), nodes_of(1, earlier=earlier)
    expected = by_loop(cache, depth, tail, reach, window)
    mask = tree_mask(config(window), cache, depth, tail, reach, torch.float32)
    assert torch.equal(mask, expected)
    assert torch.equal(tail_mask(config(window), depth, tail, reach), expected[..., cache.length :])
    for other in ("custom", "mmspec_tree"):
        found = tree_mask(config(window, attention=other), cache, depth, tail, reach, torch.bfloat16)
        assert torch.equal(found, expected)
    added = tree_mask(config(window, attention="eager"), cache, depth, tail, reach, torch.bfloat16)
    assert added.dtype == torch.bfloat16
    assert torch.equal(added == 0, expected)
    assert (added[~expected] == torch.finfo(torch.bfloat16).min).all()


@pytest.mark.parametrize("kinds", [KINDS, ["hybrid", "hybrid_sliding"]])
def test_every_kind_of_layer_has_its_mask(kinds):
    cache, (depth, tail, reach) = cache_of((6, 5)), nodes_of(2)
    full, slid = (by_loop(cache, depth, tail, reach, window) for window in (None, 2))
    for masks, end in (
        (tree_mask(config(2, kinds), cache, depth, tail, reach, torch.float32), 0),
        (tail_mask(config(2, kinds), depth, tail, reach), cache.length),
    ):
        for names in (KINDS, kinds):
            assert torch.equal(masks[names[0]], full[..., end:])
            assert torch.equal(masks[names[1]], slid[..., end:])
        assert [masks[name] for name in ("linear_attention", "conv")] == [None, None]
    # A window that no layer has counts nothing.
    assert torch.equal(tree_mask(config(2, kinds[:1]), cache, depth, tail, reach, torch.float32), full)
    assert [window_of(config(2, kinds), layer) for layer in (0, 1)] == [None, 2]
    assert (window_of(config(2), 0), window_of(config(), 0), window_of(config(2, kinds[:1]), 0)) == (2, None, None)


def test_roots_without_depth_stand_at_the_end():
    cache, (_, _, reach) = cache_of((6, 4)), nodes_of(3, nodes=1)
    zero = torch.zeros(2, 1, dtype=torch.long)
    mask = tree_mask(config(3), cache, None, None, reach, torch.float32)
    assert torch.equal(mask, by_loop(cache, zero, None, reach, 3))


def test_no_mask_where_none_is_needed():
    """One node that follows everything; or no layer with attention. Two nodes, padding or earlier nodes need one."""
    reach = torch.ones(2, 1, 1, dtype=torch.bool)
    depth = torch.zeros(2, 1, dtype=torch.long)
    assert tree_mask(config(), cache_of((6, 6)), depth, None, reach, torch.float32) is None
    assert tree_mask(config(), cache_of((6, 4)), depth, None, reach, torch.float32) is not None
    after = torch.ones(2, 1, 2, dtype=torch.bool)
    assert tree_mask(config(), cache_of((6, 6)), depth, depth, after, torch.float32) is not None
    two = torch.ones(2, 2, 2, dtype=torch.bool).tril()
    assert tree_mask(config(), cache_of((6, 6)), depth.expand(2, 2), None, two, torch.float32) is not None
    without = TreeCache(2, attending=[])
    without.commit_prompt(6, None, 2)
    assert tree_mask(config(), without, depth.expand(2, 2), None, two, torch.float32) is None


@pytest.mark.parametrize(
    ("window", "chunk", "kinds", "limit"),
    [
        (None, None, None, None),
        (8, None, KINDS, 8),
        (None, 6, ["chunked_attention"], 6),
        (8, 6, ["sliding_attention", "chunked_attention"], 6),
        (4, 6, ["sliding_attention", "chunked_attention"], 4),
        (8, 6, ["full_attention"], None),
    ],
)
def test_padding_counts_in_windows_and_chunks(window, chunk, kinds, limit):
    some = config(window, kinds)
    some.attention_chunk_size = chunk
    assert slot_limit(some) == limit
