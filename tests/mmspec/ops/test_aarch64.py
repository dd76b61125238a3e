"""C++ kernels compiled for AArch64 and run by an emulator, against this processor's kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmspec.ops import cpu_library
from mmspec.quantisation.blocks import BLOCKS
from tests.compiled import needs_kernels
from tests.mmspec.ops.test_cpu import layer_of, slots_of, softmax_attention

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.long,
    needs_kernels,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}"
    ),
]


@pytest.fixture(scope="module", params=["armv8-a", "armv8.2-a+dotprod"])
def binary(request, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("aarch64") / "driver"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-pthread", "-static", f"-march={request.param}"]
    source = Path(__file__).with_name("driver.cpp")
    subprocess.run([COMPILER, *flags, "-o", str(file), str(source)], check=True, capture_output=True)
    return file


@pytest.fixture(params=["cortex-a76", "max"])
def program(request, binary) -> list[str]:
    """The program on a processor without the matrix instruction of int8, and on one with it."""
    return [EMULATOR, "-cpu", request.param, str(binary)]


def run(program: list[str], kernel: str, sizes: list[int], *tensors: Tensor) -> Tensor:
    """Output of a kernel of the program, flat."""
    parts = [torch.tensor(sizes), *(tensor.contiguous() for tensor in tensors)]
    given = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
    done = subprocess.run([*program, kernel], input=given, check=True, capture_output=True)
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
@pytest.mark.parametrize("kind", BLOCKS)
def test_products(program, kind, rows):
    layer, _ = layer_of(kind, 50, 192)
    x = torch.randn(rows, 192)
    sizes = [cpu_library.KINDS.index(kind), 192, 50, rows, layer._blocks.numel()]
    found = run(program, "product", sizes, layer._blocks, x).view(rows, 50)
    if kind == "bfloat16":  # which sums in another order
        torch.testing.assert_close(found, layer(x), atol=1e-5, rtol=1e-4)
    else:
        assert torch.equal(found, layer(x))


@pytest.mark.parametrize("head_dim", [16, 64])
def test_attention(program, head_dim):
    query, key, value, mask = slots_of(1, 5, 150, 6, 2, head_dim)
    mask[:, :, :, :100] = True
    sizes = [5, 150, 6, 2, head_dim]
    found = run(program, "attention", sizes, query[0], key[0], value[0], mask[0, 0])
    expected = softmax_attention(query, key, value, mask, 0.125)
    torch.testing.assert_close(found.view_as(expected), expected, atol=6e-3, rtol=4e-3)
