"""Products against the limits of the processor: results of given times, and the loops of the limits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from mmspec.eval import roofline
from mmspec.eval.harness.output import make_table
from mmspec.ops import cpu, cpu_library
from tests.compiled import needs_kernels

pytestmark = needs_kernels
MEMORY = 3 << 20


def library() -> ctypes.CDLL:
    loaded = cpu_library.library()
    assert isinstance(loaded, ctypes.CDLL)
    return loaded


def test_shares_are_medians_over_the_rounds_of_shares_within_a_round() -> None:
    size = cpu.bytes_of_blocks("int4", roofline.INPUTS, 32)
    assert size == 32 * roofline.INPUTS * 5 // 8
    seconds = {roofline.READ: [1.0, 2.0, 1.5], "int4": [0.5, 1.0, 0.75], ("int4", 4): [4.0, 4.0, 2.0]}
    products = 4 * 32 * roofline.INPUTS
    assert roofline.table_rows(seconds, {"int4": 32}, {"int4": 2 * products}, 2 * size) == [
        {"weights": "int4", "rows": 4, "milliseconds": 4000.0, "gigabytes": size / 4e9, "of_reading": 0.25}
        | {"products": products / 4e9, "of_peak": 0.125}
    ]


def test_reading_takes_every_byte() -> None:
    memory = torch.randint(256, (MEMORY,), dtype=torch.uint8)
    expected = np.bitwise_xor.reduce(memory.numpy().view(np.int64))
    for threads in (1, 2, 3):
        assert library().read_bytes(memory.data_ptr(), MEMORY, threads) == expected


@pytest.mark.parametrize("kind", roofline.FORMATS)
def test_multiply_adds_are_counted(kind: str) -> None:
    number = cpu_library.KINDS.index(kind)
    once = library().multiply_add(number, 1, 1)
    lanes = 16 if library().instructions() == b"AVX-512 VNNI" else 8
    assert once == 12 * lanes * (2 if kind == "bfloat16" else 4)
    for threads in (1, 2, 3):
        assert library().multiply_add(number, 1000, threads) == 1000 * once


def test_products_and_limits_are_timed() -> None:
    memory = torch.randint(60, (MEMORY,), dtype=torch.uint8)
    limits, rows = roofline.measure(library(), memory, ["int4", "q6_k"], [1, 3], rounds=2)
    assert limits.keys() == {roofline.READ, "int4", "q6_k"}
    assert [(row["weights"], row["rows"]) for row in rows] == [("int4", 1), ("int4", 3), ("q6_k", 1), ("q6_k", 3)]
    for row in rows:  # weights fill the memory
        assert 0 <= 1 - row["gigabytes"] * row["milliseconds"] * 1e6 / MEMORY < 0.05
    assert make_table(roofline.COLUMNS, rows).row_count == 4
