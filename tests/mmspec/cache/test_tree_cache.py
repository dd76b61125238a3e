"""The cache against plain lists: tokens that each row attends to after any accepted paths and removed rows."""

import copy
import gc
import json
import pickle
import random
import weakref

import pytest
import torch

from mmspec import UserError
from mmspec.cache import tree_cache
from mmspec.cache.rows import batch_bucket, pad_rows
from mmspec.cache.tree_cache import TreeCache
from tests.compiled import needs_kernels
from tests.tiny import random_tree, root_path, valid_nodes

LAYERS, HEADS = 2, 2
WIDTHS = {"alike": [(3, 3), (3, 3)], "different": [(3, 5), (4, 3)], "indexed": [(3, 3, 2), (3, 3, 2)]}
"""Of each layer's keys and values, and of its indexer's keys."""


@pytest.fixture(autouse=True, params=WIDTHS)
def widths(request, monkeypatch):
    monkeypatch.setitem(WIDTHS, "in use", WIDTHS[request.param])


def entries(ids, layer):
    """(batch, heads, tokens, head_dim) keys and values that tell which token, layer and head they stand for."""
    keys = ids[:, None, :, None].float() + 1000.0 * layer + torch.arange(HEADS).view(1, -1, 1, 1) * 0.25
    width, values = WIDTHS["in use"][layer][:2]
    return keys.expand(-1, -1, -1, width).contiguous(), -keys.expand(-1, -1, -1, values).contiguous()


def write(cache, ids):
    """One forward pass: all layers store their keys and values of these tokens; returns what attention would see."""
    if cache.bounds is not None:
        cache.reserve_nodes(ids.shape[1])
        cache.set_write_slots(ids.shape[1])
    return [(*cache.layers[i].update(*entries(ids, i)), *indexed(cache, ids, i)) for i in range(LAYERS)]


def indexed(cache, ids, layer):
    """Keys of the layer's indexer, or None: the first keys of head 0."""
    return [
        cache.update_indexer(entries(ids, layer)[0][:, 0, :, :width], layer) for width in WIDTHS["in use"][layer][2:]
    ]


def start(batch, length, mask=None, **keywords):
    cache = TreeCache(LAYERS, **keywords)
    ids = torch.arange(1, batch * length + 1).view(batch, length)
    write(cache, ids)
    cache.commit_prompt(length, mask, batch)
    rows = [
        [int(t) for t, m in zip(ids[b], mask[b] if mask is not None else [1] * length, strict=True) if m]
        for b in range(batch)
    ]
    return cache, rows


def attended(cache, layer, row):
    """Token numbers in the slots that the row attends to, read back from keys and values of both heads."""
    keys, values, *index = write(cache, torch.zeros(cache.rows, 1, dtype=torch.long))[layer]
    if cache.bounds is None:
        slots = cache.attended[row].nonzero().flatten()
    else:
        slots = torch.arange(int(cache.bounds.lengths[row]))
    per_head = [(keys[row, h, slots, 0] - 1000.0 * layer - 0.25 * h).tolist() for h in range(HEADS)]
    assert per_head[0] == per_head[1]
    assert torch.equal(keys[row][:, slots, :1], -values[row][:, slots, :1])
    assert all(torch.equal(one[row, slots], keys[row, 0, slots, : one.shape[-1]]) for one in index)
    return per_head[0]


def commit(cache, paths):
    width = max(1, max(map(len, paths)))
    padded = [path + [-1] * (width - len(path)) for path in paths]
    if cache.bounds is not None:  # with idle rows
        padded += [[-1] * width] * (batch_bucket(len(paths)) - len(paths))
    cache.commit(torch.tensor(padded), paths)


def check(cache, rows):
    assert cache.lengths == list(map(len, rows))
    assert cache.length == max(cache.lengths, default=0)
    if cache.bounds is not None:
        idle = [0] * (len(cache.bounds.lengths) - len(rows))
        assert cache.bounds.lengths.tolist() == cache.lengths + idle
        assert int(cache.bounds.start) == cache.length
    for layer in range(LAYERS):
        for b, row in enumerate(rows):
            assert attended(cache, layer, b) == row


def test_layers_that_cache_other_entries_than_the_prompts_are_refused():
    cache = TreeCache(LAYERS)
    write(cache, torch.ones(2, 5, dtype=torch.long))
    assert torch.isfinite(cache.kv.tensors[0]).all()  # what was never written
    with pytest.raises(UserError, match=r"^layers must cache the prompt's tokens: expected 6 entries, received 5$"):
        cache.commit_prompt(6, None, 2)


@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_sequences_join_and_leave(static_shapes, seed):
    """Whoever leaves, in whatever order the others go on; buffers move only where ``version`` says so."""
    rnd, g = random.Random(seed), torch.Generator().manual_seed(seed)
    cache, rows, counter = TreeCache(LAYERS, reserve=8, static_shapes=static_shapes), [], 1
    version, address = cache.version, None

    def numbers(batch, tokens):
        nonlocal counter
        ids = torch.arange(counter, counter + batch * tokens).view(batch, tokens) % 900
        counter += batch * tokens
        return ids

    for _ in range(60):
        action = rnd.choice(["join", "leave", "step", "step", "step"])
        if action == "join" and len(rows) < 9:
            batch, length = rnd.randint(1, 3), rnd.randint(3, 30)
            prompts, ids = TreeCache(LAYERS, reserve=length), numbers(batch, length)
            mask = torch.ones_like(ids)
            mask[0, : rnd.randrange(3)] = 0
            mask[-1, 1] = rnd.randrange(2)  # padding within a prompt
            write(prompts, ids)
            prompts.commit_prompt(length, None if bool(mask.all()) else mask, batch)
            cache.append(prompts, reserve=rnd.choice([0, 40]))
            rows += [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
        elif action == "leave":
            kept = rnd.sample(range(len(rows)), rnd.randint(0, len(rows)))
            if rnd.random() < 0.5:  # the last rows move into free rows
                kept.sort()
            cache.select(kept)
            rows = [rows[row] for row in kept]
        elif rows:
            tree = random_tree(g, len(rows), rnd.choice([1, 4, 9, 40]), 50)
            ids = numbers(len(rows), tree.nodes)
            idle = batch_bucket(len(rows)) if static_shapes else len(rows)
            write(cache, pad_rows(ids, idle))
            paths = [root_path(tree, b, rnd.choice(valid_nodes(tree, b))) for b in range(len(rows))]
            paths[1:] = [path if rnd.random() < 0.8 else [] for path in paths[1:]]  # as with a drafter's rows
            commit(cache, paths)
            rows = [row + new[path].tolist() for row, new, path in zip(rows, ids, paths, strict=True)]
        if rows:
            check(cache, rows)
        if static_shapes and cache.bounds is not None:
            parts = [*cache.kv.tensors, cache.bounds.lengths, cache.bounds.start]
            now = [part.data_ptr() for part in parts]
            assert (now == address) or cache.version is not version
            version, address = cache.version, now


def test_a_cache_without_attention_has_lengths_only():
    cache, prompts = TreeCache(2, attending=[]), TreeCache(2, attending=[])
    prompts.commit_prompt(5, torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]), 2)
    cache.append(prompts)
    cache.commit(torch.tensor([[0, 1], [0, -1]]), [[0, 1], [0]])
    assert (cache.lengths, cache.length) == ([6, 6], 6)
    cache.append(prompts)
    cache.select([3, 0])
    assert (cache.lengths, cache.length, cache.rows) == ([5, 6], 6, 2)


def test_a_moved_model_begins_anew():
    """Its keys have another precision; no sequence decodes at the same time."""
    for static_shapes in (False, True):
        cache = TreeCache(1, static_shapes=static_shapes)
        for dtype in (torch.float32, torch.float64):
            prompts = TreeCache(1)
            keys = torch.randn(2, HEADS, 5, 3, dtype=dtype)
            prompts.layers[0].update(keys, keys)
            prompts.commit_prompt(5, None, 2)
            version = cache.version
            cache.append(prompts)
            assert cache.version is not version
            (buffer,) = cache.kv.tensors
            assert buffer.dtype == dtype
            assert torch.equal(buffer[0, :2, :, :5], keys)
            cache.select([])


def test_nothing_is_copied_at_most_steps():
    cache, _ = start(1, 10, reserve=64)
    assert cache.kv.capacity == 64
    buffers = set()
    for step in range(300):
        write(cache, torch.full((1, 4), step))
        buffers.add(cache.layers[0].update(*entries(torch.zeros(1, 0), 0))[0].untyped_storage().data_ptr())
        commit(cache, [[0, 1, 2]])
    assert cache.length == 910
    assert len(buffers) <= 5  # 64, 128, ... 1024


def test_large_buffers_grow_by_what_is_needed(monkeypatch):
    """Rows of other lengths that join: twice the memory would be half a gigabyte for long prompts."""
    monkeypatch.setattr(tree_cache, "_LARGE_BYTES", 1)
    cache, (first, rows) = TreeCache(LAYERS, reserve=8), start(2, 100)
    cache.append(first)
    longer, more = start(1, 110)
    cache.append(longer)
    check(cache, [*rows, *more])
    assert cache.kv.rows == 3
    assert cache.kv.capacity < 130
    addresses = set()
    for _ in range(100):
        write(cache, torch.zeros(3, 1))
        commit(cache, [[0]] * 3)
        addresses.add(cache.kv.tensors[0].data_ptr())
    assert len(addresses) <= 8  # an eighth more each time


def test_uncommitted_tokens_can_be_built_upon():
    cache, rows = start(1, 3, reserve=4)
    write(cache, torch.tensor([[20, 21]]))
    cache.offset = 2
    keys, *_ = write(cache, torch.tensor([[30, 31, 32]]))[0]
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 20, 21, 30, 31, 32]
    commit(cache, [[1, 4]])  # the second of the first pass, the last of the second
    check(cache, [[*rows[0], 21, 32]])
    assert cache.offset == 0


def test_transformers_is_told_the_length_and_that_nothing_slides():
    cache, _ = start(2, 5)
    assert cache.is_sliding == [False] * LAYERS
    cache.offset = 3
    for one in (cache, *cache.layers):
        assert one.get_seq_length() == 8
        assert one.get_mask_sizes(4) == (12, 0)
    assert cache.layers[0].get_max_length() == -1


@pytest.mark.parametrize("static_shapes", [False, True])
def test_a_row_is_restored_from_parts_and_cut(static_shapes):
    (kept, (row,)), cache = start(1, 9), TreeCache(LAYERS, reserve=4)
    version, parts = cache.version, zip(kept.parts(slice(2)), kept.parts(slice(2, 7)), strict=True)
    cache.load(json.loads(json.dumps(kept.layout)), [torch.cat(both, dim=3) for both in parts], (), 7)
    assert cache.version is not version
    check(cache, [row[:7]])
    cache.truncate(4)
    check(cache, [row[:4]])
    other = TreeCache(LAYERS, static_shapes=static_shapes)
    other.append(start(1, 5)[0])
    other.append(cache)
    check(other, [[*range(1, 6)], row[:4]])


def test_tensors_of_one_shape_share_a_buffer(request):
    """Layers that reuse another layer's keys and values have none."""
    cache = TreeCache(LAYERS + 1, reserve=16)
    write(cache, torch.zeros(1, 4))
    cache.commit_prompt(4, None, 1)
    shapes = [tuple(buffer.shape) for buffer in cache.kv.tensors]
    alike, widths = [(4, 1, 2, 16, 3)], request.node.callspec.params["widths"]
    different = [(2, 1, 2, 16, 3), (1, 1, 2, 16, 5), (1, 1, 2, 16, 4)]
    assert shapes == {"alike": alike, "different": different, "indexed": [*alike, (2, 1, 1, 16, 2)]}[widths]


def test_layers_of_a_copy_belong_to_the_copy():
    """No layer keeps its cache."""
    cache = TreeCache(2)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert all(layer.cache is other for layer in other.layers)
    assert all(layer.cache is cache for layer in cache.layers)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


@needs_kernels
def test_keys_and_values_in_int8_stay_with_their_tokens():
    """Through a prompt, rows that join, a commit of a path and rows that leave, in half the memory."""
    if WIDTHS["in use"] != WIDTHS["alike"]:
        pytest.skip("one shape")
    torch.manual_seed(0)
    centre = torch.randn(LAYERS, HEADS, 128)
    cache, known = TreeCache(LAYERS, centre=centre), []

    def passed(cache, tokens):
        """Store and return (batch, heads, tokens, 128) keys and values of both layers."""
        states = torch.randn(LAYERS, 2, tokens[0], HEADS, tokens[1], 128)
        for layer, (keys, values) in enumerate(states):
            attended = cache.update(keys + centre[layer][:, None], values, layer)
            assert all(one.dtype == torch.float32 for one in attended)
        return states

    for length in (5, 9):
        prompt = TreeCache(LAYERS, centre=centre)
        states = passed(prompt, (1, length))
        prompt.commit_prompt(length, None, 1)
        cache.append(prompt)
        known.append(states[:, :, 0])
    nodes = passed(cache, (2, 4))
    cache.commit(torch.tensor([[0, 2], [1, -1]]), [[0, 2], [1]])
    known = torch.cat([known[1], nodes[:, :, 1, :, 1:2]], dim=-2)  # of the row that stays
    cache.select([1])
    for layer in range(LAYERS):
        found = cache.keys_values(layer, 1)
        assert found.lengths.tolist() == [10]
        parts = found.keys[0] - centre[layer][:, None], found.values[0]
        for mine, expected in zip(parts, known[layer], strict=True):
            torch.testing.assert_close(mine.float(), expected, atol=0.06, rtol=0)
    (buffer,) = cache.kv.tensors
    assert buffer.nbytes / buffer[..., 0].numel() == 132  # 256 in bfloat16
