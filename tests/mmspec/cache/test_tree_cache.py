"""The cache as bookkeeping: what a row attends to is what plain lists say, whatever was accepted."""

import pytest
import torch

from mmspec import UserError
from mmspec.cache.tree_cache import TreeCache
from tests.tiny import random_tree, root_path, valid_nodes

LAYERS, HEADS, WIDTH = 2, 2, 3


def entries(ids, layer):
    """(batch, heads, tokens, head_dim) keys and values that tell which token, layer and head they stand for."""
    keys = ids[:, None, :, None].float() + 1000.0 * layer + torch.arange(HEADS).view(1, -1, 1, 1) * 0.25
    return keys.expand(-1, -1, -1, WIDTH).contiguous(), -keys.expand(-1, -1, -1, WIDTH).contiguous()


def write(cache, ids):
    """One forward pass: all layers store their keys and values of these tokens; returns what attention would see."""
    return [cache.layers[i].update(*entries(ids, i)) for i in range(LAYERS)]


def start(batch, length, mask=None, **keywords):
    cache = TreeCache(LAYERS, **keywords)
    ids = torch.arange(1, batch * length + 1).view(batch, length)
    write(cache, ids)
    cache.commit_prompt(length, mask, batch, ids.device)
    rows = [
        [int(t) for t, m in zip(ids[b], mask[b] if mask is not None else [1] * length, strict=True) if m]
        for b in range(batch)
    ]
    return cache, rows


def attended(cache, layer, row):
    """Token numbers in the slots that the row attends to, read back from keys and values of both heads."""
    probe = torch.zeros(len(cache.lengths), 1, dtype=torch.long)
    keys, values = cache.layers[layer].update(*entries(probe, layer))
    slots = cache.attended[row].nonzero().flatten()
    per_head = [(keys[row, h, slots, 0] - 1000.0 * layer - 0.25 * h).tolist() for h in range(HEADS)]
    assert per_head[0] == per_head[1]
    assert torch.equal(keys[row][:, slots], -values[row][:, slots])
    return per_head[0]


def commit(cache, paths):
    width = max(1, max(map(len, paths)))
    cache.commit(torch.tensor([path + [-1] * (width - len(path)) for path in paths]), paths)


def check(cache, rows):
    assert cache.length == max(cache.lengths)
    for layer in range(LAYERS):
        for b, row in enumerate(rows):
            assert attended(cache, layer, b) == row


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 6])
def test_random_trees_and_paths(batch, length):
    g = torch.Generator().manual_seed(batch + length)
    cache, rows = start(batch, length, reserve=4)
    counter = 100
    for _ in range(25):
        tree = random_tree(g, batch, int(torch.randint(1, 12, (1,), generator=g)), 50)
        ids = torch.arange(counter, counter + batch * tree.nodes).view(batch, -1)
        counter = (counter + ids.numel()) % 900
        seen = write(cache, ids)
        assert seen[1][0].shape[2] == cache.length + tree.nodes
        paths = []
        for b in range(batch):
            alive = valid_nodes(tree, b)
            end = alive[int(torch.randint(len(alive), (1,), generator=g))]
            # Now and then a row that has finished, which keeps nothing.
            finished = batch > 1 and b == 1 and float(torch.rand((), generator=g)) < 0.3
            paths.append([] if finished else root_path(tree, b, end))
            rows[b] += [float(ids[b, i]) for i in paths[b]]
        commit(cache, paths)
        check(cache, rows)


def test_commit_at_every_node():
    tree = random_tree(torch.Generator().manual_seed(1), 1, 20, 50, ragged=False)
    ids = torch.arange(50, 70)[None]
    for node in range(20):
        cache, rows = start(1, 5)
        write(cache, ids)
        path = root_path(tree, 0, node)
        commit(cache, [path])
        check(cache, [rows[0] + [float(ids[0, i]) for i in path]])


def test_left_padding_is_not_attended():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    cache, rows = start(2, 4, mask)
    assert rows == [[3, 4], [5, 6, 7, 8]]
    check(cache, rows)
    write(cache, torch.tensor([[20, 21], [30, 31]]))
    commit(cache, [[0, 1], [0]])
    assert cache.padded
    check(cache, [[3, 4, 20, 21], [5, 6, 7, 8, 30]])


def test_nothing_is_copied_at_most_steps():
    cache, _ = start(1, 10, reserve=64)
    buffers = set()
    for step in range(300):
        write(cache, torch.full((1, 4), step))
        buffers.add(cache.layers[0].update(*entries(torch.zeros(1, 0), 0))[0].untyped_storage().data_ptr())
        commit(cache, [[0, 1, 2]])
    assert cache.length == 910
    assert len(buffers) <= 5  # 64, 128, ... 1024


def test_reserved_room_is_taken_at_once():
    cache, _ = start(1, 10, reserve=200)
    assert cache.capacity == 200
    for _ in range(40):
        write(cache, torch.zeros(1, 4))
        commit(cache, [[0, 1, 2, 3]])
    assert cache.capacity == 200


def test_what_was_never_written_is_finite():
    cache, _ = start(2, 3, reserve=100)
    assert torch.isfinite(cache.layers[0].update(*entries(torch.zeros(2, 90), 0))[0]).all()


def test_uncommitted_tokens_can_be_built_upon():
    cache, rows = start(1, 3, reserve=4)
    write(cache, torch.tensor([[20, 21]]))
    cache.offset = 2
    keys, _ = write(cache, torch.tensor([[30, 31, 32]]))[0]
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


def test_context_limit_is_an_error_with_numbers():
    with pytest.raises(UserError, match=r"^the model's context limit is 8 tokens: 9 are needed$"):
        start(1, 9, max_length=8)
    cache, _ = start(1, 7, max_length=8)
    write(cache, torch.tensor([[1, 2, 3]]))  # drafts beyond the limit need not be kept
    commit(cache, [[0]])
    with pytest.raises(UserError, match="context limit is 8 tokens: 9 are needed"):
        write(cache, torch.tensor([[1]]))


def test_layers_of_different_shape_are_refused():
    cache, _ = start(1, 3)
    keys, values = entries(torch.zeros(1, 2), 1)
    with pytest.raises(UserError, match=r"expected \(1, 2, 2, 3\), layer 1 has \(1, 2, 2, 3\) and \(1, 2, 2, 2\)"):
        cache.layers[1].update(keys, values[..., :2])
