"""The C++ kernels: products and attention against torch, bits that do not depend on what else a pass computes."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.cache.tree_cache import TreeCache
from mmspec.core.plan import StepPlan
from mmspec.drafters.growth import grow_tree
from mmspec.ops import compiler, cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear, place_together
from mmspec.quantisation.formats import FORMATS, StoredRows, stored_layer
from mmspec.quantisation.linear import GROUP
from tests.compiled import needs_kernels
from tests.gguf_rows import dequantised, random_rows, stored
from tests.mmspec.quantisation.test_formats import BUILDS

SHAPES = [(192, 576), (576, 1536), (48, 64), (50, 72), (3, 5)]
THREADS = (1, 2, 3)


def layer_of(kind: str, rows: int, columns: int, bias: bool = False) -> tuple[BlockLinear, Tensor]:
    torch.manual_seed(rows + columns)
    weight = torch.randn(rows, columns) / columns**0.5
    return BLOCKS[kind](weight, torch.randn(rows) if bias else None), weight


def exact_layer(kind: str, rows: int, columns: int, bias: bool = False) -> tuple[BlockLinear, Tensor]:
    """A layer of any kind, and its weight before it is rounded to bfloat16, in float64."""
    if kind in FORMATS:
        data, weight = stored(kind, rows, columns)
        return stored_layer(data, torch.randn(rows).bfloat16() if bias else None), weight.double()
    layer, _ = layer_of(kind, rows, columns, bias)
    return layer, exact_weight(layer).double()


def quantised(x: Tensor) -> Tensor:
    """Inputs as the kernels of quantised weights take them, in float64."""
    groups = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    most, steps = groups.abs().amax(-1, keepdim=True), torch.tensor(127.0)  # scalars would be divided as reciprocals
    codes = (groups * (steps / most)).round().double()
    return (codes * (most / steps).double()).flatten(-2)[..., : x.shape[-1]]


def exact_weight(layer: BlockLinear) -> Tensor:
    """The weight before it is rounded to bfloat16."""
    parts = [part.float() for part in layer._parts()]
    if layer.kind in ("float32", "bfloat16"):
        whole = parts[0]
    else:
        shifted = parts[0] - (128 if layer.kind == "int8" else 0)
        low = parts[2][..., None] if layer.kind == "int4" else 0
        whole = (shifted.unflatten(1, (-1, GROUP)) * parts[1][..., None] + low).flatten(1)
    return whole[: layer.out_features, : layer.in_features]


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 129, 257])
@pytest.mark.parametrize(
    ("kind", "columns"),
    [*((kind, columns) for kind in BLOCKS for columns in (72, 300)), *((kind, 768) for kind in FORMATS)],
)
def test_products_are_those_of_the_quantised_weight_and_inputs(kind, columns, count):
    layer, weight = exact_layer(kind, 50, columns, bias=True)
    x = torch.randn(count, columns)
    inputs = {"float32": x.double(), "bfloat16": x.bfloat16().double()}.get(kind, quantised(x))
    bound = inputs.abs() @ weight.abs().T + layer.bias.abs()  # rounding errors are proportional to it
    error = (layer(x) - (inputs @ weight.T + layer.bias)).abs() / bound
    assert error.max() <= 3e-7, error.max()


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, shape) for kind in BLOCKS for shape in SHAPES), *((kind, (200, 512)) for kind in FORMATS)],
)
def test_rows_have_the_same_bits_for_any_number_of_rows_and_threads(kind, shape):
    layer, _ = exact_layer(kind, *shape)
    x = torch.randn(133, shape[1])
    whole = layer(x)
    place_together([layer])
    for count in THREADS:
        torch.set_num_threads(count)
        for size in (1, 2, 3, 5, 8, 9, 133):
            assert torch.equal(layer(x[:size]), whole[:size])
            assert torch.equal(layer(x[-size:]), whole[-size:])


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "fill"),
    [*((kind, None) for kind in BLOCKS), *((kind, fill) for kind in FORMATS for fill in (0, 127, 128, 255))],
)
def test_the_greatest_codes_do_not_saturate(kind, fill):
    if kind in BLOCKS:
        layer = BLOCKS[kind](torch.full((16, 1536), 127 / 256))
        weight = exact_weight(layer)
    else:
        rows = random_rows(kind, (16, 1024), fill=fill)
        layer, weight = stored_layer(StoredRows.of(kind, torch.from_numpy(rows), 1024), None), dequantised(kind, rows)
    x = torch.tensor([2.0, 0.0, -2.0])[:, None].expand(3, weight.shape[1])
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-6 * float(weight.abs().sum(1).max()), rtol=0)


@needs_kernels
def test_the_first_calls_may_have_any_number_of_rows():
    """In a new process, whose buffers are as large as the calls so far were."""
    code = """
import torch
from mmspec.quantisation.blocks import BLOCKS
layer = BLOCKS["int8"](torch.randn(64, 2048), None)
for rows in (1, 17, 33, 120):
    x = torch.randn(rows, 2048)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x])), rows
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_MMAP_THRESHOLD_": "1073741824"}])
def test_freed_tensors_are_given_back_to_the_system(environment):
    """Also where smaller ones that stay lie between them; not where the environment says otherwise."""
    code = """
import sys, torch
from pathlib import Path
from mmspec.ops.cpu import give_back_freed_memory
give_back_freed_memory()
kept = []
for _ in range(2):
    large = []
    for _ in range(64):
        large.append(torch.ones(1 << 20))
        kept.append(torch.ones(1 << 12))
    kept.append(torch.ones(1 << 21))  # the end of the heap
    largest = int(Path("/proc/self/statm").read_text().split()[1])
    del large
print(largest - int(Path("/proc/self/statm").read_text().split()[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    given_back = int(done.stdout) * 4096
    assert (given_back > 200 << 20) == (not environment)


def slots_of(batch: int, nodes: int, slots: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    torch.manual_seed(slots)
    query = torch.randn(batch, nodes, heads + 2, head_dim)[:, :, :heads]
    key, value = torch.randn(2, batch, kv_heads, slots + 7, head_dim).bfloat16()[:, :, :, :slots]
    mask = (torch.rand(batch, 1, nodes, slots + 5) < 0.6)[..., :slots]
    mask[..., 0] = True
    return query, key, value, mask


def stored_as(form: str, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Keys and values in a cache, with slots after them, and as floats."""
    if form == "bfloat16":
        return key, value, key, value
    centre = 3 * torch.randn(key.shape[1], key.shape[3])
    parts = [cpu.int8_heads(key, centre), cpu.int8_heads(value)]
    stored = [torch.nn.functional.pad(part, (0, 0, 0, 7))[:, :, : key.shape[2]] for part in parts]
    # The softmax does not change with the constant that is subtracted from all keys.
    return *stored, cpu.float_heads(stored[0], centre), cpu.float_heads(stored[1])


forms = pytest.mark.parametrize("form", ["bfloat16", "int8"])


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """In float64, of queries rounded as the kernel rounds them, (batch, nodes, heads * head_dim)."""
    base = torch.tensor(1.44269504)  # log2(e)
    grouped = (query * (torch.tensor(scale) * base)).bfloat16().double().transpose(1, 2)
    scores = grouped.unflatten(1, (key.shape[1], -1)) @ key.double()[:, :, None].transpose(-1, -2) / base.double()
    shares = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1)
    return (shares @ value.double()[:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2).float()


@pytest.mark.long
@needs_kernels
@forms
@pytest.mark.parametrize(("build", "features", "flags"), BUILDS)
def test_attention_of_other_builds(build, features, flags, form, monkeypatch):
    if not features <= set(compiler.processor().split()):
        pytest.skip(f"needs a processor with {', '.join(features)}")
    library = cpu_library.compiled(flags)
    for head_dim in cpu.HEAD_DIMS:
        query, key, value, mask = slots_of(2, 5, 200, 9, 3, head_dim)
        key, value, *_ = stored_as(form, key, value)
        for given in (mask, None):  # blocks of a node each, and of all
            with monkeypatch.context() as other:
                other.setattr(cpu_library, "functions", lambda: library)
                found = cpu.attention(query, key, value, given, head_dim**-0.5)
            expected = cpu.attention(query, key, value, given, head_dim**-0.5)
            torch.testing.assert_close(found, expected, atol=1e-3 if form == "bfloat16" else 1e-6, rtol=0)


@needs_kernels
@forms
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "slots"),
    [
        *((9, 3, head_dim, 200) for head_dim in cpu.HEAD_DIMS),
        *((heads, kv_heads, 64, 200) for heads, kv_heads in ((4, 4), (8, 1), (50, 1))),
        *((9, 3, 64, slots) for slots in (5, 63, 64, 65)),
    ],
)
def test_attention_is_that_of_torch(heads, kv_heads, head_dim, slots, form):
    """Queries are rounded to 8 bits, like softmax weights with bfloat16; their errors average out. Equal weights show
    each element's place."""
    query, key, value, mask = slots_of(2, 5, slots, heads, kv_heads, head_dim)
    *stored, key, value = stored_as(form, key, value)
    causal = torch.ones(2, 1, 5, slots).tril(slots - 5).bool()
    shared = mask[:1].expand(2, -1, -1, -1)
    for given, same in ((mask, mask), (None, causal), (causal, causal), (shared, shared)):
        found = cpu.attention(query, *stored, given, head_dim**-0.5)
        expected = softmax_attention(query, key, value, same, head_dim**-0.5)
        torch.testing.assert_close(found, expected, atol=6e-3 if form == "bfloat16" else 2e-2, rtol=4e-3)
        equal = cpu.attention(0 * query, *stored, given, 1.0)
        mean = softmax_attention(0 * query, key, value, same, 1.0)
        torch.testing.assert_close(equal, mean, atol=2e-6 if form == "bfloat16" else 1e-4, rtol=1e-5)


def tree_masks(prefix: int, nodes: int) -> dict[str, Tensor]:
    """Masks of nodes after a prefix, (nodes, prefix + nodes) bool."""
    chain = torch.ones(nodes, prefix + nodes).tril(prefix).bool()
    star = chain & torch.eye(nodes, prefix + nodes).roll(prefix, 1).bool()
    star[:, :prefix] = star[:, prefix] = True
    late = chain.clone()
    late[:, : prefix // 3] = False  # padding on the left
    short = star.clone()
    short[:, prefix - 5 : prefix] = False  # a row that is shorter than another
    window = chain & ~torch.ones_like(chain).tril(prefix - 70)
    forked = chain.clone()
    forked[-1, -2] = nodes == 1  # the last two are siblings, after a chain that may be longer than a block
    return {"chain": chain, "star": star, "late": late, "short": short, "window": window, "forked": forked}


@needs_kernels
@forms
@pytest.mark.parametrize("kind", ["chain", "star", "late", "short", "window", "forked"])
@pytest.mark.parametrize("prefix", [3, 64, 127, 128, 200])
def test_a_node_attends_as_a_pass_of_its_own_does(prefix, kind, form):
    """In trees and prompts of any number of nodes, and whatever lies between their slots."""
    query, key, value, _ = slots_of(1, 64, prefix + 64, 6, 2, 64)
    key, value, *_ = stored_as(form, key, value)
    for nodes in (1, 15, 17, 64):  # 16 share what is read
        mask = tree_masks(prefix, nodes)[kind]
        slots = prefix + nodes
        for count in THREADS:
            torch.set_num_threads(count)
            given = None if kind == "chain" and count == 2 else mask[None, None]
            found = cpu.attention(query[:, :nodes], key[:, :, :slots], value[:, :, :slots], given, 0.125)
            for node in {0, nodes * 7 // 8, nodes - 1}:
                parts = (part[:, :, :slots][:, :, mask[node]].contiguous() for part in (key, value))
                alone = cpu.attention(query[:, node : node + 1], *parts, None, 0.125)
                assert torch.equal(found[:, node : node + 1], alone)


@needs_kernels
@forms
@pytest.mark.parametrize("head_dim", [16, 48, 128])
@pytest.mark.parametrize("group", range(1, 10))
def test_few_queries_attend_as_many_do(group, head_dim, form):
    """Keys and values in bfloat16 are transposed in registers for up to 8 queries."""
    query, key, value, _ = slots_of(1, 20, 150, group, 1, head_dim)
    key, value, *_ = stored_as(form, key, value)
    found = cpu.attention(query, key, value, None, 0.125)
    for node in (0, 19):
        parts = (part[:, :, : 131 + node] for part in (key, value))
        assert torch.equal(found[:, node : node + 1], cpu.attention(query[:, node : node + 1], *parts, None, 0.125))


@needs_kernels
@forms
def test_nodes_without_slots_read_nothing_and_others_nothing_of_slots_that_they_skip(form):
    query, key, value, mask = slots_of(1, 6, 141, 2, 1, 32)
    mask[:, :, 2] = False
    key, value, *_ = stored_as(form, key, value)
    skipped = torch.nan if form == "bfloat16" else 255  # a scale that is not a number
    key[:, :, [3, 140]], value[:, :, [3, 140]], mask[..., 3] = skipped, skipped, False
    found = cpu.attention(query, key[:, :, :140], value[:, :, :140], mask[..., :140], 1.0)
    assert not found.isnan().any()
    assert (found[0, 2] == 0).all()
    assert not cpu.attention(query, key[:, :, 4:140], value[:, :, 4:140], None, 1.0).isnan().any()


@needs_kernels
@pytest.mark.parametrize("head_dim", cpu.HEAD_DIMS)
def test_keys_and_values_in_int8(head_dim):
    """Rounded to the unit of each head and slot; outliers of keys, and what all keys have in common, cost little."""
    key, value = torch.randn(2, 2, 3, 40, head_dim)
    stored = cpu.int8_heads(value)
    unit = value.abs().amax(-1, keepdim=True) / 127
    assert (cpu.float_heads(stored) - value).abs().le(unit * 0.51).all()
    centre = 100 * torch.randn(3, head_dim)
    key[..., 1] *= 20
    found = cpu.float_heads(cpu.int8_heads(key + centre[:, None], centre), centre) - centre[:, None]
    # Orthonormal: as far from the keys as the codes are from their products with the matrix.
    block = head_dim & -head_dim
    spread = key.unflatten(-1, (-1, block)) @ hadamard(block)
    bound = spread.flatten(-2).abs().amax(-1) / 127 * (head_dim / 12) ** 0.5
    error = (found - key).norm(dim=-1)
    assert (error < 1.6 * bound + 1e-4).all()
    assert (error > 0.5 * bound).all()


def hadamard(size: int) -> Tensor:
    """By parities of common bits."""
    rows = range(size)
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for i in rows] for j in rows]) / size**0.5


@needs_kernels
def test_large_scores_do_not_overflow():
    query, key, value, _ = slots_of(1, 2, 140, 2, 1, 32)
    query, key = query.mul_(1000), key.mul_(1000)
    found = cpu.attention(query, key, value, None, 1.0)
    causal = torch.ones(1, 1, 2, 140).tril(138).bool()
    expected = softmax_attention(query, key, value, causal, 1.0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=4e-3)


X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("x", "packed"),
    [
        *((X.to(dtype), None) for dtype in (torch.float64, torch.bfloat16, torch.int32)),
        *(
            (X[:1], None),
            (X[None], None),
            (X.flatten(1), 1),
            (X.to("meta"), None),
            (torch.zeros(2, 3, 5)[..., :4], None),
        ),
        *((torch.zeros(2, 3, 8)[..., ::2], 1), (torch.zeros(2, 3, 5)[..., :4], 2), (torch.zeros(2, 4, 3).mT, 1)),
    ],
)
def test_kernels_take_tensors_of_one_dtype_shape_layout_and_device_alone(x, packed):
    with pytest.raises(
        RuntimeError, match=r"expected a contiguous tensor \(2, 3, 4\) of torch.float32 on the CPU: got"
    ):
        cpu.pointer(x, torch.float32, (2, 3, 4), packed)
    for whole, last in ((X, None), (torch.zeros(2, 3, 5)[..., :4], 1), (torch.zeros(2, 5, 4)[:, :3], 2)):
        assert cpu.pointer(whole, torch.float32, (2, 3, 4), last) == whole.data_ptr()


@needs_kernels
def test_products_attention_and_decoders_refuse_other_dtypes_and_sizes():
    layer, weights = BLOCKS["int8"](torch.randn(32, 64)).native, cpu.sublayers([cpu_library.Sublayer(parts=1)])
    query, _, value, mask = slots_of(1, 2, 70, 2, 2, 32)
    x, turns, cache = torch.zeros(2, 3, 64), torch.zeros(1, 2, 3, 2, 8), torch.zeros(2, 2, 1, 5, 16).bfloat16()
    others = value.float(), value[..., :16], cpu.int8_heads(value)[..., :32], value.contiguous()
    pairs = [*((query, value, one) for one in others), *((query, one, value) for one in others)]
    passes = (x.double(), cache, 2), (x[:1], cache, 2), (x, cache, 3), (x, cache[:, :1], 2), (x, cache.float(), 2)
    for call, *given in (
        *((cpu.linear, layer, one) for one in (x.double(), x[..., :63])),
        *((cpu.attention, *one, None, 1.0) for one in (*pairs, (query.double(), value, value))),
        (cpu.attention, query, value, value, mask[..., 1:], 1.0),
        *((cpu.write_keys_values, weights, one, turns, *rest) for one, *rest in passes),
    ):
        with pytest.raises(RuntimeError, match=r"expected a contiguous tensor|must have equal strides"):
            call(*given)


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
def test_keys_and_values_of_projections_in_several_forms(gated):
    """Also where queries and keys share a form; two of three rows are in the first 128 nodes."""
    x, angle, cache = torch.randn(3, 60, 64), 6 * torch.rand(3, 60, 16), torch.zeros(4, 4, 2, 70, 32).bfloat16()
    turns, expected, kept, parts = torch.stack([angle.cos(), angle.sin()], dim=-2)[None], cache.clone(), [], []
    cos, sin = turns[0, :, :, None].unbind(3)
    for place, kinds in enumerate((("int8", "bfloat16", "float32"), ("bfloat16", "bfloat16", "int4"))):
        own = [BLOCKS[kind](torch.randn(rows, 64)) for kind, rows in zip(kinds, (128 << gated, 64, 64), strict=True)]
        joined = [cpu.joined_weights([one.native for one in some]) for _, some in groupby(own, lambda one: one.kind)]
        kept += [*own, out := BLOCKS["int8"](torch.randn(64, 128))]
        sizes = dict(heads=4, groups=2, head_dim=32, rotated=32, gated=gated, place=place, ends_layer=1)
        parts.append(cpu.sublayer_weights("attention", joined, out.native, **sizes))
        low, high = own[1](x).view(3, 60, 2, 2, 16).unbind(3)
        keys, values = torch.cat([low * cos - high * sin, high * cos + low * sin], -1), own[2](x).view(3, 60, 2, 32)
        for plane, states in enumerate((keys, values), 2 * place):
            expected[plane, :3, :, 5:65] = states.transpose(1, 2).bfloat16()
    weights, whole = cpu.sublayers(parts), cache.clone()
    cpu.write_keys_values(weights, x, turns, cache, 5)
    assert torch.equal(cache, expected)
    cpu.decode_sublayers(weights, x, turns, None, whole, 5)
    assert torch.equal(whole[:2], expected[:2])


@needs_kernels
@pytest.mark.parametrize("count", [1, 5, 16, 130, 49152])
def test_the_greatest_are_in_order_and_equal_ones_by_index(count):
    torch.manual_seed(count)
    coarse = (torch.randn(3, 2, count) * 4).round()  # many are equal
    for x in (torch.randn(3, 2, count), coarse, coarse.masked_fill(torch.rand(3, 2, count) < 0.9, -torch.inf)):
        expected, order = x.sort(dim=-1, descending=True, stable=True)
        for k in {1, min(8, count), min(64, count)}:
            for number in THREADS:
                torch.set_num_threads(number)
                best, places = cpu.greatest(x, k)
                assert torch.equal(best, expected[..., :k])
                assert torch.equal(places, order[..., :k])


@needs_kernels
@pytest.mark.parametrize("count", [5, 16, 49153])
def test_the_greatest_of_a_log_softmax(count):
    torch.manual_seed(0)
    x = torch.randn(4, 3, count) * 5
    x[0, :, 1], x[1, 1, :4] = 300.0, -torch.inf
    best, places = cpu.greatest(x, 4, log_softmax=True)
    expected = x.double().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(best, expected.values[..., :4].float(), atol=1e-5, rtol=1e-6)
    assert torch.equal(places, expected.indices[..., :4])


@needs_kernels
@pytest.mark.parametrize("features", [16, 48, 1536])
def test_norms_of_rows_are_those_of_torch(features):
    torch.manual_seed(features)
    x, gain = torch.randn(3, 7, features) * torch.tensor([0.01, 1.0, 100.0])[:, None, None], torch.randn(features)
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt() * gain
    for threads in THREADS:
        torch.set_num_threads(threads)
        normed = cpu.norm(x, gain, 1e-3)
        torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(cpu.norm(x[1:2, 4], gain, 1e-3), normed[1:2, 4])


@needs_kernels
@pytest.mark.parametrize("count", [1, 5, 16, 1025, 49153])
def test_sampling_is_by_the_cumulative_distribution(count):
    torch.manual_seed(count)
    scores = torch.randn(4 if count > 9999 else 40, 50, count) * 4
    uniform = torch.rand(scores.shape[:2])
    uniform[0, 0], uniform[0, 1] = 0.0, 1 - 2**-24
    borders = scores.double().softmax(-1).cumsum(-1)
    for number in THREADS:
        torch.set_num_threads(number)
        tokens = cpu.quantile(scores, uniform)
        below = borders.gather(-1, (tokens - 1).clamp(min=0)[..., None])[..., 0].where(tokens > 0, 0.0)
        above = borders.gather(-1, tokens[..., None])[..., 0]
        assert (below <= uniform + 2e-6).all()
        assert (uniform <= above + 2e-6).all()
        assert torch.equal(cpu.quantile(scores[3:4, 7], uniform[3:4, 7]), tokens[3:4, 7])


@needs_kernels
def test_impossible_tokens_are_not_sampled():
    scores = torch.full((1, 2000), -torch.inf)
    scores[0, [0, 700, 1999]] = torch.tensor([-1000.0, 3.0, 3.0])  # exp(-1003) is 0 in float32
    drawn = [int(cpu.quantile(scores, torch.tensor([uniform]))) for uniform in (0.0, 0.4, 0.6, 1 - 2**-24)]
    assert drawn == [700, 700, 1999, 1999]


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


@pytest.mark.parametrize("system", ["linux", "other"])
def test_large_caches_of_huge_pages_grow(system, monkeypatch):
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


@pytest.mark.parametrize(("name", "number"), [("MALLOC_ARENA_MAX", -8), ("MALLOC_TRIM_THRESHOLD_", -1)])
def test_settings_of_the_environment_stay(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as glibc reads them: only thresholds end with an underscore."""
    for one in [one for one in os.environ if one.startswith("MALLOC_")]:
        monkeypatch.delenv(one)
    numbers: list[int] = []
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda one, value: numbers.append(one)))
    cpu.give_back_freed_memory()
    assert number in numbers
    numbers.clear()
    monkeypatch.setenv(name, "4")
    cpu.give_back_freed_memory()
    assert len(numbers) == 2
    assert number not in numbers
