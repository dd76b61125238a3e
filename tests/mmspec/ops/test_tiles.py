"""Products in AMX's tile registers, by loops and as this processor runs them, against the kernels in use."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmspec.ops import compiler
from mmspec.quantisation.blocks import BLOCKS, BlockLinear
from tests.compiled import needs_kernels
from tests.gguf_rows import stored
from tests.mmspec.ops.test_cpu import layer_of

ROWS = (1, 7, 8, 9, 16, 17, 24, 31, 32, 40)
SHAPES = dict.fromkeys(BLOCKS, ((50, 72), (48, 576))) | dict.fromkeys(("Q4_K", "Q5_K", "Q6_K"), ((50, 768),))
CASES = [("Q5_0", (50, 288)), *((kind, shape) for kind, shapes in SHAPES.items() for shape in shapes)]
TILES = ["-mamx-tile", "-mamx-int8", "-mamx-bf16"]

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(
        not (torch.cpu._is_vnni_supported() and torch.cpu._is_avx512_bf16_supported()),
        reason="needs AVX-512 with VNNI and BF16",
    ),
]


def built(folder: Path, *flags: str) -> ctypes.CDLL:
    file, source = folder / "tiles.so", Path(__file__).with_name("tiles.cpp")
    usual = ["-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
    compiler.run_compiler([compiler.find_compiler(), *usual, *TILES, *flags, "-o", str(file), str(source)], [folder])
    return ctypes.CDLL(str(file))


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


def check(library: ctypes.CDLL, kind: str, shape: tuple[int, int]) -> None:
    """The bits of the kernels in use; bfloat16, of which tiles sum in another order, those of a whole product."""
    layer = layer_of(kind, *shape, bias=True)[0] if kind in BLOCKS else stored(kind, *shape)[0].layer()
    x = torch.randn(max(ROWS), shape[1])
    expected = layer(x)
    if kind == "bfloat16":
        whole = product(library, layer, x, 1)
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)
        expected = whole
    for rows in ROWS:
        assert torch.equal(product(library, layer, x[:rows], 1 + rows % 2), expected[:rows])


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_products_by_loops(loops: ctypes.CDLL, kind: str, shape: tuple[int, int]) -> None:
    before = loops.tile_products()
    check(loops, kind, shape)
    assert (loops.tile_products() > before) == (kind != "float32")


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_single_row_of_integers_takes_no_tiles(loops: ctypes.CDLL, kind: str) -> None:
    before = loops.tile_products()
    product(loops, layer_of(kind, 50, 72)[0], torch.randn(1, 72), 1)
    assert (loops.tile_products() > before) == (kind == "bfloat16")


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_products_by_instructions_where_they_are_permitted(
    instructions: ctypes.CDLL, kind: str, shape: tuple[int, int]
) -> None:
    check(instructions, kind, shape)


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_a_build_has_the_instructions(instructions: ctypes.CDLL) -> None:
    found = subprocess.run(["objdump", "-d", instructions._name], capture_output=True, text=True, check=True).stdout
    assert {"tdpbsud", "tdpbf16ps"} <= set(found.split())
