"""Formats of GGUF in the kernels: weights are those of the package gguf; ``test_cpu.py`` has their products."""

from __future__ import annotations

import copy
import ctypes
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mmspec.ops import compiler, cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear, JoinedLinear
from mmspec.quantisation.formats import FORMATS, concatenated, stored_layer
from tests.compiled import needs_kernels
from tests.gguf_rows import stored

THREADS = (1, 2, 3)
BUILDS = {"portable": ["-O1", "-DMMSPEC_PORTABLE"], "AVX2": [*cpu_library._FLAGS, *cpu_library._AVX2_FLAGS]}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_kind_of_weights_has_a_layer() -> None:
    assert set(cpu_library.KINDS) == {*BLOCKS, *(cls.kind for cls in FORMATS.values())}


@pytest.mark.parametrize("rows", [1, 16, 50])
@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_those_of_the_package(form: str, rows: int) -> None:
    data, weight = stored(form, rows, 768)
    layer = stored_layer([data], None)
    assert torch.equal(data.dense(), weight)
    assert (layer.in_features, layer.out_features) == (768, rows)
    assert torch.equal(layer.weight, weight.bfloat16())
    order = torch.randperm(rows)
    assert torch.equal(layer.rows(order).weight, weight[order].bfloat16())
    assert torch.equal(stored_layer([data.ordered(order)], None).weight, weight[order].bfloat16())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight, layer.weight)


def test_blocks_are_about_as_large_as_in_the_file() -> None:
    """A pass reads this much; K formats have a byte per factor in place of 6 bits."""
    for form in FORMATS:
        data, _ = stored(form, 16, 2048)
        assert stored_layer([data], None)._blocks.numel() <= 1.12 * data.kept[0].numel(), form


@needs_kernels
def test_a_layer_of_several_formats_has_the_outputs_of_each() -> None:
    parts = [stored("Q4_K", 40, 512), stored("Q4_K", 24, 512, seed=1), stored("Q6_K", 20, 512), stored("Q8_0", 7, 512)]
    joined = concatenated(data for data, _ in parts)
    assert [len(rows.places) for rows in joined] == [64, 20, 7]
    bias, x = torch.randn(91), torch.randn(9, 512)
    layer = stored_layer(joined, bias)
    assert isinstance(layer, JoinedLinear)
    apart = [stored_layer([rows], part) for rows, part in zip(joined, bias.split([64, 20, 7]), strict=True)]
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
    layers = {form: stored_layer([stored(form, 50, 512)[0]], None) for form in FORMATS}
    layers |= {kind: BLOCKS[kind](torch.randn(50, 512)) for kind in BLOCKS}
    for form, layer in layers.items():
        found = torch.empty(10, 50)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, found)]
        library.linear(ctypes.byref(layer.native), pointers[0], ctypes.c_int64(10), pointers[1], 1)
        if form == "bfloat16":  # which sums in another order
            torch.testing.assert_close(found, layer(x), atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(found, layer(x)), form
