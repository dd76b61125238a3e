"""Products of bfloat16 and attention in AMX's tile registers, by loops and by this processor."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmspec.ops import compiler, cpu, cpu_library
from mmspec.quantisation.blocks import BlockLinear
from tests.compiled import needs_kernels
from tests.mmspec.ops.test_cpu import layer_of, slots_of, softmax_attention

ROWS = (1, 7, 8, 9, 16, 17, 24, 31, 32, 40)
SHAPES = (50, 72), (48, 576)

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="needs AVX-512 with BF16"),
]


def built(folder: Path, *flags: str) -> ctypes.CDLL:
    file, source = folder / "tiles.so", Path(__file__).with_name("tiles.cpp")
    usual = ["-std=c++17", "-O1", "-march=native", "-mamx-tile", "-mamx-bf16", "-ffp-contract=off"]
    usual += ["-shared", "-fPIC", "-pthread"]
    compiler.run_compiler([compiler.find_compiler(), *usual, *flags, "-o", str(file), str(source)], [folder])
    library = ctypes.CDLL(str(file))
    library.attention.argtypes = [ctypes.POINTER(cpu_library.Attention), ctypes.c_int]
    return library


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("loops"), "-DMMSPEC_LOOPS")


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("instructions"))


def product(library: ctypes.CDLL, layer: BlockLinear, x: Tensor, threads: int) -> Tensor:
    x, out = x.contiguous(), torch.empty(len(x), layer.out_features)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out)]
    library.products(ctypes.byref(layer.native), pointers[0], ctypes.c_int64(len(x)), pointers[1], threads)
    return out


def check(library: ctypes.CDLL, shape: tuple[int, int]) -> None:
    """Near the kernels in use, which may sum in another order; each row has the same bits in any batch."""
    layer = layer_of("bfloat16", *shape, bias=True)[0]
    x = torch.randn(max(ROWS), shape[1])
    whole = product(library, layer, x, 1)
    torch.testing.assert_close(whole, layer(x), atol=1e-5, rtol=1e-4)
    for rows in ROWS:
        assert torch.equal(product(library, layer, x[:rows], 1 + rows % 2), whole[:rows])


@pytest.mark.parametrize("shape", SHAPES)
def test_products_by_loops(loops: ctypes.CDLL, shape: tuple[int, int]) -> None:
    before = loops.tile_products()
    check(loops, shape)
    assert loops.tile_products() > before


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_integers_take_no_tiles(loops: ctypes.CDLL, kind: str) -> None:
    before = loops.tile_products()
    product(loops, layer_of(kind, 50, 72)[0], torch.randn(16, 72), 1)
    assert loops.tile_products() == before


@pytest.mark.parametrize("shape", SHAPES)
def test_products_by_instructions_where_they_are_permitted(instructions: ctypes.CDLL, shape: tuple[int, int]) -> None:
    check(instructions, shape)


@pytest.mark.parametrize("build", ["loops", "instructions"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (50, 1, 96), (4, 2, 16)])
def test_attention(build, heads, kv_heads, head_dim, request, monkeypatch) -> None:
    """Equal to torch's result; a node's result does not depend on other nodes."""
    library = request.getfixturevalue(build)
    monkeypatch.setattr(cpu_library, "functions", lambda: library)
    before = library.tile_products()
    query, key, value, mask = slots_of(2, 20, 200, heads, kv_heads, head_dim)
    mask[..., :70] = True
    found = cpu.attention(query, key, value, mask, head_dim**-0.5)
    torch.testing.assert_close(found, softmax_attention(query, key, value, mask, head_dim**-0.5), atol=6e-3, rtol=4e-3)
    equal = cpu.attention(0 * query, key, value, mask, 1.0)
    torch.testing.assert_close(equal, softmax_attention(0 * query, key, value, mask, 1.0), atol=2e-6, rtol=1e-5)
    for node in (0, 13):
        alone = cpu.attention(query[:, node : node + 1], key, value, mask[:, :, node : node + 1], head_dim**-0.5)
        assert torch.equal(alone[:, 0], found[:, node])
    assert (library.tile_products() > before) == (build == "loops")


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_a_build_has_the_instructions(instructions: ctypes.CDLL) -> None:
    done = subprocess.run(["objdump", "-d", instructions._name], capture_output=True, text=True, check=True)
    assert "tdpbf16ps" in done.stdout.split()
