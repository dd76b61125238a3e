"""Formats of GGUF in the kernels: weights equal to the package gguf; ``test_cpu.py`` has their products."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmspec.errors import UserError
from mmspec.ops import builds, compiler, cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear
from mmspec.quantisation.formats import FORMATS, StoredRows, stored_layer
from mmspec.targets.gguf_file import _OpenFile
from tests.compiled import needs_kernels
from tests.gguf_rows import dequantised, random_rows, stored

THREADS = (1, 2, 3)
BUILDS = [
    ("portable", frozenset(), ["-std=c++17", "-O1", "-ffp-contract=off", "-DMMSPEC_PORTABLE"]),
    *((name, frozenset(), flags) for name, flags in builds.BUILDS.items()),
    *builds.WHEEL,
]


def test_every_kind_of_weights_has_a_layer() -> None:
    assert set(cpu_library.KINDS) == {*BLOCKS, *(cls.kind for cls in FORMATS.values())}


@pytest.mark.parametrize("rows", [1, 16, 50])
@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_those_of_the_package(form: str, rows: int) -> None:
    data, weight = stored(form, rows, 768)
    layer = stored_layer(data, None)
    assert torch.equal(data.dense(), weight)
    assert (layer.in_features, layer.out_features) == (768, rows)
    assert torch.equal(layer.weight, weight.bfloat16())
    order = torch.randperm(rows)
    assert torch.equal(layer.rows(order).weight, weight[order].bfloat16())
    assert torch.equal(stored_layer(data.ordered(order), None).weight, weight[order].bfloat16())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight, layer.weight)


def test_rows_of_a_file_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path, memory = tmp_path / "rows.gguf", stored("Q8_0", 3, 32)[0]
    path.write_bytes(bytes(range(102)))
    file, other = _OpenFile(path), _OpenFile(path)
    rows = StoredRows("Q8_0", 32, 34, torch.tensor([0, 34, 68]), (file,), in_file=True)
    assert rows.ordered(torch.tensor([2, 0, 1])).data()[:, 0].tolist() == [68, 0, 34]
    joined = (rows, replace(rows, format="Q4_0"), replace(rows, kept=(other,)), memory)
    assert [rows.follows(one) for one in joined] == [True, False, False, False]
    assert memory.follows(stored("Q8_0", 5, 32)[0])
    os.truncate(path, 101)
    for read in (rows.data, rows.dense):
        with pytest.raises(UserError, match=r"rows\.gguf was cut while it was read: expected all of its tensors$"):
            read()


def test_blocks_are_about_as_large_as_in_the_file() -> None:
    """A pass reads this much; K formats have a byte per factor in place of 6 bits."""
    for form in FORMATS:
        data, _ = stored(form, 16, 2048)
        assert stored_layer(data, None)._blocks.numel() <= 1.12 * data.kept[0].numel(), form


@needs_kernels
def test_layers_of_several_formats_that_are_joined_have_the_outputs_of_each() -> None:
    parts = [stored("Q4_K", 64, 512), stored("Q6_K", 20, 512), stored("Q8_0", 7, 512)]
    biases, x = torch.randn(91).split([64, 20, 7]), torch.randn(9, 512)
    layers = [stored_layer(rows, bias) for (rows, _), bias in zip(parts, biases, strict=True)]
    joined, expected = cpu.joined_weights([layer.native for layer in layers]), torch.cat([one(x) for one in layers], 1)
    for count in THREADS:
        torch.set_num_threads(count)
        assert torch.equal(cpu.linear(joined, x), expected)


BIAS = torch.arange(50) / 16 - 1.5  # exact in bfloat16


def extremes(form: str) -> Iterator[tuple[BlockLinear, Tensor]]:
    """Layers with random codes, the least and the greatest, and their weights."""
    for fill in (None, 0, 127, 128, 255):
        data = random_rows(form, (50, 512), fill=fill)
        yield stored_layer(StoredRows.of(form, torch.from_numpy(data), 512), BIAS.clone()), dequantised(form, data)


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize(("build", "features", "flags"), BUILDS)
def test_other_builds_give_the_same_bits(build: str, features: frozenset[str], flags: list[str]) -> None:
    """What other processors run: without vector instructions, with vectors of 256 bits, and the builds of wheels."""
    if not features <= set(compiler.processor().split()):
        pytest.skip(f"needs a processor with {', '.join(features)}")
    library = cpu_library.compiled(flags)
    assert isinstance(library, ctypes.CDLL), library
    if library.instructions().decode() != build:
        pytest.skip(f"needs a processor with {build}")
    ends = torch.where(torch.rand(7, 512) < 0.5, 3.0, -3.0)  # codes of 127 and -127
    x = torch.cat([torch.full((1, 512), 3.0), torch.full((1, 512), -3.0), ends, torch.randn(8, 512)])
    layers = {form: list(extremes(form)) for form in FORMATS}
    for kind, cls in BLOCKS.items():
        layers[kind] = [(cls(w, BIAS.clone()), w) for w in (torch.randn(50, 512), torch.full((50, 512), 127 / 256))]
    for form, each in layers.items():
        for layer, weight in each:
            expected = layer(x)
            if form in FORMATS:
                bound = 3e-6 * weight.abs().sum(1).double().max()
                exact = x[:9].double() @ weight.double().T + BIAS
                torch.testing.assert_close(expected[:9].double(), exact, atol=bound, rtol=0)
            for rows in (1, 2, 3, 8, 9, 16, 17):
                found = torch.empty(rows, 50)
                library.linear(layer.native, x.data_ptr(), rows, found.data_ptr(), 1)
                if form == "bfloat16":  # which sums in another order
                    torch.testing.assert_close(found, expected[:rows], atol=1e-4, rtol=1e-4)
                else:
                    assert torch.equal(found, expected[:rows]), (form, rows)


def test_a_build_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMSPEC_CPU_BUILD", raising=False)
    assert cpu_library.build() in cpu_library.BUILDS
    compiled: list[list[str]] = []
    monkeypatch.setattr(cpu_library, "_has_instructions", lambda: True)
    monkeypatch.setattr(cpu_library, "compiled", lambda flags, prebuilt: compiled.append(flags))
    for name, flags in cpu_library.BUILDS.items():
        monkeypatch.setenv("MMSPEC_CPU_BUILD", name)
        cpu_library.library.__wrapped__()
        assert (cpu_library.build(), compiled.pop()) == (name, flags)
    monkeypatch.setenv("MMSPEC_CPU_BUILD", "SSE")
    with pytest.raises(UserError, match=r"MMSPEC_CPU_BUILD must be one of AVX-512 VNNI, .*, AArch64: got 'SSE'"):
        cpu_library.build()
