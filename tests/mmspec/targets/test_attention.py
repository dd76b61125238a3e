"""The attention under trees against its formula, head by head; masks against a loop over rows, nodes and slots."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmspec import UserError, ops
from mmspec.cache.tree_cache import SlotBounds, TreeCache
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.ops import cpu
from mmspec.targets.attention import NAME, PASS, TreePass, slot_limit, tail_mask, tree_attention, tree_mask, window_of
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.targets import prefilled
from tests.tiny import shared_model

KINDS = ["full_attention", "sliding_attention"]


def by_the_formula(q, k, v, allowed, scale, cap=None, bias=None):
    heads, per = q.shape[1], q.shape[1] // k.shape[1]
    read = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head // per].transpose(1, 2) * scale
        scores = scores if cap is None else cap * (scores / cap).tanh()
        scores = scores if bias is None else scores + bias[:, head]
        read.append(scores.masked_fill(~allowed[:, 0], -math.inf).softmax(-1) @ v[:, head // per])
    return torch.stack(read, dim=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (15, 5)])
@pytest.mark.parametrize(("nodes", "slots"), [(1, 1), (1, 9), (7, 7), (5, 64), (63, 100)])
@pytest.mark.parametrize("additive", [False, True])
def test_groups_and_masks(heads, kv_heads, nodes, slots, additive):
    g = torch.Generator().manual_seed(nodes)
    q, k, v = (torch.randn(2, n, length, 12, generator=g) for n, length in ((heads, nodes), *[(kv_heads, slots)] * 2))
    allowed = torch.rand(2, 1, nodes, slots, generator=g) < 0.7
    allowed[..., 0] = True
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min) if additive else allowed
    layer = nn.Module()
    layer.num_key_value_groups = heads // kv_heads
    read, weights = tree_attention(layer, q, k, v, mask, scaling=0.3)
    assert weights is None
    torch.testing.assert_close(read, by_the_formula(q, k, v, allowed, 0.3), rtol=1e-5, atol=1e-5)
    by_head = mask.repeat(1, heads, 1, 1)
    torch.testing.assert_close(tree_attention(layer, q, k, v, by_head, scaling=0.3)[0], read, rtol=1e-5, atol=1e-5)
    bias = torch.randn(1, heads, nodes, slots, generator=g)
    biased, _ = tree_attention(layer, q, k, v, mask, scaling=0.3, position_bias=bias)
    torch.testing.assert_close(biased, by_the_formula(q, k, v, allowed, 0.3, bias=bias), rtol=1e-5, atol=1e-5)
    assert not tree_attention(layer, q, k, v, mask, dropout=1.0)[0].any()
    with pytest.raises(ValueError, match="does not support `softcap`"):
        tree_attention(layer, q, k, v, mask, softcap=5.0)


def test_with_static_shapes_keys_and_values_are_not_copied(monkeypatch):
    """Latent attention has keys that are wider than its values."""
    q, k, v = torch.randn(1, 4, 3, 24), torch.randn(1, 4, 12, 24), torch.randn(1, 4, 12, 10)
    bounds, layer, run = SlotBounds(torch.tensor([5]), torch.tensor([7])), nn.Module(), []
    layer.layer_idx, tail = 0, torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    original = ops.tree_attention
    monkeypatch.setattr(
        ops, "tree_attention", lambda *given, **options: run.append(given) or original(*given, **options)
    )
    passed = TreePass(shared_model("llama").config, bounds, torch.arange(3)[None])
    read, _ = tree_attention(layer, q, k, v, tail, **{PASS: passed})
    assert all(ours is theirs for ours, theirs in zip(run[0], (q, k, v), strict=False))
    allowed = torch.zeros(1, 1, 3, 12, dtype=torch.bool)
    allowed[..., :5], allowed[..., 7:10] = True, tail
    torch.testing.assert_close(read, by_the_formula(q, k, v, allowed, 24**-0.5), rtol=1e-5, atol=1e-5)
    layer.layer_idx, windowed = 1, TreePass(config(3, KINDS), bounds, torch.arange(3)[None])
    read, _ = tree_attention(layer, q, k, v, tail, scaling=0.2, softcap=3.0, **{PASS: windowed})
    allowed &= torch.arange(5, 8)[:, None] - torch.tensor([0, 1, 2, 3, 4, 0, 0, 5, 6, 7, 0, 0]) < 3
    torch.testing.assert_close(read, by_the_formula(q, k, v, allowed, 0.2, cap=3.0), rtol=1e-5, atol=1e-5)
    for name in ("position_bias", "s_aux"):
        with pytest.raises(UserError, match=f"^attention must be a softmax of scaled scores: Module has {name}$"):
            tree_attention(layer, q, k, v, tail, **{PASS: passed, name: torch.zeros(1)})


@needs_kernels
@pytest.mark.parametrize(("heads", "kv_heads", "patches", "size"), [(3, 3, 70, 64), (4, 2, 33, 80), (2, 2, 1, 16)])
def test_patches_of_towers_attend_in_the_kernels(heads, kv_heads, patches, size, monkeypatch):
    """In bfloat16, all patches; not with a mask or biases, causally, in another dtype or with heads of another size."""
    calls, original = [], cpu.attention
    monkeypatch.setattr(cpu, "attention", lambda *given: calls.append(given) or original(*given))
    g, layer = torch.Generator().manual_seed(patches), nn.Module()
    sizes = (heads, patches), *[(kv_heads, patches + 5)] * 2
    given = [torch.randn(2, count, number, size, generator=g).transpose(1, 2) for number, count in sizes]
    half = [part.bfloat16() for part in given]
    layer.is_causal, layer.num_key_value_groups = False, heads // kv_heads
    everything = torch.ones(2, 1, patches, patches + 5, dtype=torch.bool)
    read, weights = tree_attention(layer, *half, None, scaling=0.3)
    assert (read.dtype, weights, len(calls)) == (torch.bfloat16, None, 1)
    expected = by_the_formula(*[part.float() for part in half], everything, 0.3)
    assert float((read.float() - expected).norm()) < 0.01 * float(expected.norm())
    default, _ = tree_attention(layer, *half, None, is_causal=None)
    assert torch.equal(default, tree_attention(layer, *half, None, scaling=size**-0.5)[0])
    del calls[:]
    tree_attention(layer, *given, None)
    tree_attention(layer, *half, everything)
    tree_attention(layer, *half, None, is_causal=True)
    tree_attention(layer, *half, None, position_bias=torch.zeros(1, heads, patches, patches + 5).bfloat16())
    tree_attention(layer, *[part[..., :10] for part in half], None)
    layer.is_causal = True
    tree_attention(layer, *half, None)
    assert not calls


def attention_of(model):
    return {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }


@pytest.mark.parametrize("name", ["qwen2", "llava"])
def test_passes_run_it_and_the_model_keeps_its_own(name, monkeypatch):
    model, run = shared_model(name), []
    before, target, prompt = attention_of(model), TransformersTarget(model), Prompt(torch.tensor([[5, 6, 7]]))
    assert set(before.values()) == {"sdpa"}
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        NAME,
        lambda *args, **kw: run.append(NAME) or tree_attention(*args, **kw),
    )
    layers = model.config.get_text_config().num_hidden_layers
    prefilled(target, prompt, 8)
    assert len(run) == layers
    target.verify(TokenTree.root(torch.tensor([5])))
    assert len(run) == 2 * layers
    assert attention_of(model) == before

    def fails(*_, **__):
        assert model.config.get_text_config()._attn_implementation == NAME
        raise RuntimeError("in a pass")

    target.keep([])
    monkeypatch.setattr(model.get_decoder(), "forward", fails)
    with pytest.raises(RuntimeError, match="in a pass"):
        prefilled(target, prompt, 8)
    assert attention_of(model) == before
    assert not model.get_decoder()._forward_hooks


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


def by_loop(cache, depth, tail_depth, reach, near):
    """(batch, 1, nodes, slots): committed tokens and reached nodes at positions near to the node's own."""
    tail, masks = depth if tail_depth is None else torch.cat([tail_depth, depth], 1), []
    for row, length in enumerate(cache.lengths):
        keys = [*range(cache.length), *(length + tail[row]).tolist()]
        masks.append([[]])
        for own, reached in zip(depth[row].tolist(), reach[row].tolist(), strict=True):
            known = [*cache.attended[row].tolist(), *reached]
            masks[-1][0].append([seen and near(length + own, key) for seen, key in zip(known, keys, strict=True)])
    return torch.tensor(masks)


def within(window):
    return lambda query, key: window is None or query - key < window


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_chunks_equal_a_loop(chunk):
    cache, nodes = cache_of((6, 4)), nodes_of(1, earlier=3)
    text = config(kinds=["full_attention", "chunked_attention"])
    text.attention_chunk_size = chunk
    masks = tree_mask(text, cache, *nodes, torch.float32)
    assert torch.equal(masks["full_attention"], by_loop(cache, *nodes, within(None)))
    expected = by_loop(cache, *nodes, lambda query, key: query // chunk == key // chunk)
    assert torch.equal(masks["chunked_attention"], expected)


@pytest.mark.parametrize("earlier", [0, 3])
@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize(("lengths", "padding"), [((6, 6), (0, 0)), ((6, 4), (0, 0)), ((6, 6), (2, 0))])
def test_masks_equal_a_loop(lengths, padding, window, earlier):
    cache, (depth, tail, reach) = cache_of(lengths, padding), nodes_of(1, earlier=earlier)
    expected = by_loop(cache, depth, tail, reach, within(window))
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
    full, slid = (by_loop(cache, depth, tail, reach, within(window)) for window in (None, 2))
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
    assert torch.equal(mask, by_loop(cache, zero, None, reach, within(3)))


def test_no_mask_where_none_is_needed():
    one, zero = torch.ones(2, 1, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.long)
    two, after = torch.ones(2, 2, 2, dtype=torch.bool).tril(), torch.ones(2, 1, 2, dtype=torch.bool)
    without = TreeCache(2, attending=[])
    without.commit_prompt(6, None, 2)
    for cache, depth, tail, reach, needed in (
        (cache_of((6, 6)), zero, None, one, False),
        (cache_of((6, 4)), zero, None, one, True),
        (cache_of((6, 6)), zero, zero, after, True),
        (cache_of((6, 6)), zero.expand(2, 2), None, two, True),
        (without, zero.expand(2, 2), None, two, False),
    ):
        assert (tree_mask(config(), cache, depth, tail, reach, torch.float32) is not None) == needed


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
