"""Formats of GGUF in the kernels: weights are those of the package gguf, products those of these weights."""

from __future__ import annotations

import copy
import ctypes
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.ops import compiler, cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear, JoinedLinear, place_together
from mmspec.quantisation.formats import FORMATS, StoredRows, concatenated, stored_layer
from mmspec.quantisation.linear import GROUP
from tests.compiled import needs_kernels
from tests.gguf_rows import dequantised, random_rows, stored

THREADS = (1, 2, 3)
BUILDS = {"portable": ["-O1", "-DMMSPEC_PORTABLE"], "AVX2": [*cpu_library._FLAGS, *cpu_library._AVX2_FLAGS]}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def quantised(x: Tensor) -> Tensor:
    """Inputs as the kernels take them, in float64."""
    groups = x.unflatten(-1, (-1, GROUP))
    most, steps = groups.abs().amax(-1, keepdim=True), torch.tensor(127.0)  # scalars would be divided as reciprocals
    return ((groups * (steps / most)).round().double() * (most / steps).double()).flatten(-2)


def test_every_kind_of_weights_has_a_layer() -> None:
    assert set(cpu_library.KINDS) == {*BLOCKS, *(cls.kind for cls, _ in FORMATS.values())}


@pytest.mark.parametrize("rows", [1, 16, 50])
@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_those_of_the_package(form: str, rows: int) -> None:
    data, weight = stored(form, rows, 768)
    layer = data.layer()
    assert (layer.in_features, layer.out_features) == (768, rows)
    assert torch.equal(layer.weight, weight.bfloat16())
    order = torch.randperm(rows)
    assert torch.equal(layer.rows(order).weight, weight[order].bfloat16())
    assert torch.equal(data.ordered(order).layer().weight, weight[order].bfloat16())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight, layer.weight)


def test_blocks_are_about_as_large_as_in_the_file() -> None:
    """A pass reads this much; K formats have a byte per factor in place of 6 bits."""
    for form in FORMATS:
        data, _ = stored(form, 16, 2048)
        assert data.layer()._blocks.numel() <= 1.12 * data.data.numel(), form


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 17, 129])
@pytest.mark.parametrize("form", FORMATS)
def test_products_are_those_of_the_package_s_weights(form: str, count: int) -> None:
    data, weight = stored(form, 50, 768)
    bias, x = torch.randn(50).bfloat16(), torch.randn(count, 768)
    exact = quantised(x)
    found, expected = data.layer(bias)(x), exact @ weight.double().T + bias
    bound = exact.abs() @ weight.double().abs().T + bias.abs()  # rounding errors are proportional to it
    assert ((found - expected).abs() <= 3e-7 * bound).all()


@needs_kernels
@pytest.mark.parametrize("form", FORMATS)
def test_rows_have_the_same_bits_for_any_number_of_rows_and_threads(form: str) -> None:
    layer, x = stored(form, 200, 512)[0].layer(), torch.randn(133, 512)
    whole = layer(x)
    place_together([layer])
    for count in THREADS:
        torch.set_num_threads(count)
        for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 133):
            assert torch.equal(layer(x[:size]), whole[:size])
            assert torch.equal(layer(x[-size:]), whole[-size:])


@needs_kernels
@pytest.mark.parametrize("fill", [0, 127, 128, 255])
@pytest.mark.parametrize("form", FORMATS)
def test_the_greatest_codes_do_not_saturate(form: str, fill: int) -> None:
    rows = random_rows(form, (16, 1024), fill=fill)
    layer, weight = StoredRows(form, torch.from_numpy(rows)).layer(), dequantised(form, rows)
    x = torch.tensor([2.0, 0.0, -2.0])[:, None].expand(3, 1024)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-6 * float(weight.abs().sum(1).max()), rtol=0)


@needs_kernels
def test_a_layer_of_several_formats_has_the_outputs_of_each() -> None:
    parts = [stored("Q4_K", 40, 512), stored("Q4_K", 24, 512, seed=1), stored("Q6_K", 20, 512), stored("Q8_0", 7, 512)]
    joined = concatenated(data for data, _ in parts)
    assert [len(rows.data) for rows in joined] == [64, 20, 7]
    bias, x = torch.randn(91), torch.randn(9, 512)
    layer = stored_layer(joined, bias)
    assert isinstance(layer, JoinedLinear)
    apart = [rows.layer(part) for rows, part in zip(joined, bias.split([64, 20, 7]), strict=True)]
    expected = torch.cat([one(x) for one in apart], dim=1)
    for count in THREADS:
        torch.set_num_threads(count)
        assert torch.equal(cpu.linear(layer.native, x), expected)
        assert torch.equal(layer(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x), expected)


@needs_kernels
def test_one_format_needs_no_joining() -> None:
    (data, weight), (other, more) = stored("Q5_1", 16, 64), stored("Q5_1", 16, 64, seed=1)
    layer = stored_layer(concatenated([data, other]), None)
    assert isinstance(layer, BlockLinear)
    assert torch.equal(layer.weight, torch.cat([weight, more]).bfloat16())


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize("build", BUILDS)
def test_other_builds_give_the_same_bits(build: str, tmp_path: Path) -> None:
    """What other processors run: without vector instructions, and with vectors of 256 bits."""
    file = tmp_path / "other.so"
    flags = ["-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", *BUILDS[build]]
    command = [compiler.find_compiler(), *flags, "-o", str(file), str(cpu_library.SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    library = ctypes.CDLL(str(file))
    x = torch.cat([torch.randn(9, 512), F.pad(torch.full((1, 500), 3.0), (0, 12))])
    layers = {form: stored(form, 50, 512)[0].layer() for form in FORMATS}
    layers |= {kind: BLOCKS[kind](torch.randn(50, 512)) for kind in BLOCKS}
    for form, layer in layers.items():
        found = torch.empty(10, 50)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, found)]
        library.linear(ctypes.byref(layer.native), pointers[0], ctypes.c_int64(10), pointers[1], 1)
        if form == "bfloat16":  # which sums in another order
            torch.testing.assert_close(found, layer(x), atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(found, layer(x)), form
